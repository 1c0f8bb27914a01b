"""`autofit doctor`."""

from rich.console import Console

from autofit.cli.options import ClearStore, Device, Json
from autofit.cli.output import heavy, print_json
from autofit.report import cleared_text, doctor_table


def doctor(device: Device = None, clear_store: ClearStore = False, as_json: Json = False) -> int:
    """What this machine offers: device, budget, and which techniques are available.

    Examples:
      autofit doctor
      autofit doctor --device cpu --json
    """
    if clear_store:
        data = heavy("autofit.api.doctor", "clear_store")()
        print_json(data) if as_json else Console().print(cleared_text(data), soft_wrap=True, markup=False)
    else:
        data = heavy("autofit.api.doctor", "examine")(device)
        print_json(data) if as_json else Console().print(doctor_table(data), markup=False)
    return 0
