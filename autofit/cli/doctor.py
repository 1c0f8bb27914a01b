"""`autofit doctor`."""

from autofit.cli.options import ClearStore, Device, Json
from autofit.cli.output import heavy, print_answer
from autofit.core.options import search_options
from autofit.report.listings import cleared_text, doctor_table


def doctor(device: Device = None, clear_store: ClearStore = False, as_json: Json = False) -> int:
    """What this machine offers: device, budget, and which techniques are available.

    Examples:
      autofit doctor
      autofit doctor --device cpu --json
    """
    search_options(device=device)  # before torch is imported

    if clear_store:
        data = heavy("autofit.api.doctor", "clear_store")()
        return print_answer(data, cleared_text(data), as_json, soft_wrap=True, markup=False)

    data = heavy("autofit.api.doctor", "examine")(device)
    return print_answer(data, doctor_table(data), as_json, markup=False)
