"""One mean for all channels, or one for each."""

from autofit.data.options import Normalisation


def test_one_number_is_for_all_channels() -> None:
    mean, deviation = Normalisation((0.25,), (0.1, 0.2, 0.3)).tensors(3)
    assert mean.tolist() == [0.25] * 3
    assert len(deviation) == 3
