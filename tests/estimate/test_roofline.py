from dataclasses import replace

import pytest

from autofit.core.config import Config
from autofit.estimate.operator_costs import Cost
from autofit.estimate.rates import Rates, rates_of
from autofit.estimate.roofline import Speed, Work, passes_of, waits_of
from autofit.estimate.scaling import Grid, Symbols
from autofit.hardware.catalogue import card, hardware_of
from tests import tiny

RATES = Rates({"float32": 1e12, "tf32": 4e12, "bfloat16": 8e12}, 1e11, 1e10, 1e-5, "a test")
GRID, SYMBOLS = Grid.of([1], [1]), Symbols(13, 17, 19)
PRODUCT = Cost("matmul", "float32", 10**12, (4, 4))
PASS = Cost("memory", "float32", 0, (10**11,))
COPY = Cost("transfer", "float32", 0, (10**10,))


def _seconds(*costs: Cost, **speed: bool) -> dict[str, float]:
    return waits_of(costs, Speed(RATES, **{"asynchronous": False, **speed}))


def test_an_operator_waits_for_arithmetic_or_for_memory() -> None:
    told = _seconds(PRODUCT, PASS, COPY)
    assert (told["compute"], told["memory"], told["transfer"]) == pytest.approx((1.0, 1.0, 1.0))
    assert told["launch"] == pytest.approx(3e-5)


def test_tf32_and_lower_formats_are_faster() -> None:
    assert _seconds(PRODUCT, tf32=True)["compute"] == pytest.approx(0.25)
    assert _seconds(Cost("matmul", "bfloat16", 10**12, (4,)))["compute"] == pytest.approx(0.125)


def test_a_card_multiplies_all_formats_of_eight_bits_at_their_rate() -> None:
    """As float32 a product in fp8 looked ten times slower than in bf16."""
    rates = rates_of(card("h200"))
    speed = Speed(rates, asynchronous=True)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        assert (
            speed.flops_per_second("matmul", dtype)
            == rates.matmul["float8"]
            > 1.5 * rates.matmul["bfloat16"]
        )
    assert Speed(RATES, asynchronous=False).flops_per_second("matmul", "float8_e4m3fn") == 1e12
    assert speed.flops_per_second("memory", "float8_e4m3fn") == rates.matmul["float32"]


def test_a_gpu_hides_launching_behind_work() -> None:
    small = Cost("memory", "float32", 0, (8,))
    assert _seconds(PRODUCT, asynchronous=True)["launch"] == 0.0
    assert _seconds(small, asynchronous=True)["launch"] == pytest.approx(1e-5, rel=1e-3)


def test_a_card_launches_ahead_as_far_as_its_work_reaches() -> None:
    small, large = Cost("memory", "float32", 0, (8,)), replace(PASS, sizes=(10**6,))
    assert _seconds(*[small] * 4, asynchronous=True)["launch"] == pytest.approx(4e-5, rel=1e-3)
    assert _seconds(large, *[small] * 4, asynchronous=True)["launch"] == pytest.approx(
        4e-5, rel=1e-3
    )
    assert _seconds(large, *[small] * 4, asynchronous=True)["memory"] == pytest.approx(
        1e-5, rel=1e-3
    )


def test_unpacking_weights_of_4_bits_takes_the_host_of_a_card_longer_than_other_operators() -> None:
    unpacking = Cost("memory", "uint8", 0, (8,), "bitsandbytes::dequantize_4bit")
    assert _seconds(unpacking, asynchronous=True)["launch"] == pytest.approx(5e-5, rel=1e-3)
    # on a CPU it is measured as a whole
    assert _seconds(unpacking)["launch"] == pytest.approx(1e-5)


def test_a_card_waits_at_each_product_in_int8_whatever_is_launched_meanwhile() -> None:
    product = Cost("matmul", "float32", 10**9, (4, 4), "aten::_int_mm")
    others = [Cost("memory", "float32", 0, (8,))] * 50
    alone = 1e-3 + 0.9e-3
    waits = _seconds(product, *others, asynchronous=True)
    assert waits["compute"] == pytest.approx(alone, rel=1e-3)
    assert waits["launch"] == 0.0  # 50 operators are launched in the 1.9 ms
    assert sum(_seconds(product, product, asynchronous=True).values()) == pytest.approx(
        2 * alone, rel=1e-3
    )
    # on a CPU it is measured as a whole
    assert _seconds(product)["compute"] == pytest.approx(1e-3, rel=1e-3)


def test_copies_beside_the_computation_hide_nothing_but_are_launched_with_it() -> None:
    """An update waits for its copies, and the host launches on meanwhile."""
    small, copy = Cost("memory", "float32", 0, (8,)), replace(COPY, sizes=(10**6,))
    # 500 us of launches, a copy of 100 us
    costs, speed = ([*[small] * 50, copy], Speed(RATES, asynchronous=True))
    waiting, beside = (
        waits_of(costs, speed, overlapping=overlapping) for overlapping in (False, True)
    )
    assert waiting["transfer"] == beside["transfer"] == pytest.approx(1e-4)
    assert sum(waiting.values()) == pytest.approx(51e-5)
    assert beside["transfer"] + beside["launch"] == pytest.approx((50 + 5) * 1e-5)


def test_a_kernel_of_a_card_reads_and_writes_besides_its_arithmetic() -> None:
    product = replace(PRODUCT, sizes=(10**10, 10**10))
    assert _seconds(product)["compute"] == pytest.approx(1.0)
    assert _seconds(product, asynchronous=True)["compute"] == pytest.approx(1.2)


def test_a_large_product_on_a_card_takes_what_was_measured() -> None:
    """257 TFLOP/s on an A100, of 8192 x 8192 matrices of random numbers; the clocks of a long training aside."""
    size = 8192
    product = Cost("matmul", "bfloat16", 2 * size**3, (2 * size * size,) * 3)
    rates = rates_of(card("a100-80gb"))
    told = Work.of([product], GRID, SYMBOLS).seconds(Speed(rates, asynchronous=True))
    assert 2 * size**3 / float(told["compute"][0]) == pytest.approx(257e12, rel=0.07)


def test_attention_is_slower_than_large_products_and_most_of_all_backwards() -> None:
    rates = rates_of(card("h100"))

    def seconds(name: str) -> float:
        cost = Cost("attention", "bfloat16", 10**12, (8,), f"aten::_scaled_dot_product_{name}")
        return float(
            Work.of([cost], GRID, SYMBOLS).seconds(Speed(rates, asynchronous=True))["compute"][0]
        )

    products = 10**12 / rates.matmul["bfloat16"]
    assert (
        products
        < seconds("cudnn_attention")
        < seconds("flash_attention")
        < seconds("flash_attention_backward")
    )


def test_only_cards_compile_an_optimizers_step_to_save_traffic() -> None:
    """What the CPU takes is measured."""
    compiled = [
        Speed.of_update(RATES, hardware, Config(optimizer=optimizer)).compiled
        for hardware in (hardware_of(card("h100")), tiny.CPU)
        for optimizer in ("adamw-4bit", "adamw")
    ]
    assert compiled == [True, False, False, False]


def test_an_operator_takes_as_many_times_longer_as_was_measured() -> None:
    slow = replace(RATES, operators={"aten::exp float32": (0.5, 3.0)})
    cost = replace(PASS, name="aten::exp")
    told = Work.of([cost, PASS], GRID, SYMBOLS).seconds(Speed(slow, asynchronous=False))
    assert float(told["memory"][0]) == pytest.approx(4.5)


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        ({"aten::exp float32": (0.0, 3.0)}, (0.0, 1.0)),
        ({"aten::exp float32": (0.0, 3.0), "aten::exp": (0.0, 3.0)}, (0.0, 3.0)),
        ({"aten::exp bfloat16": (0.0, 5.0), "aten::exp": (0.0, 3.0)}, (0.0, 5.0)),
    ],
)
def test_an_operator_of_another_number_format_stands_for_one_that_was_not_measured(
    operators: dict[str, tuple[float, float]], expected: tuple[float, float]
) -> None:
    speed = Speed(replace(RATES, operators=operators), asynchronous=False)
    assert speed.measured("aten::exp bfloat16 2+2", "aten::exp bfloat16") == expected


def test_passing_a_mode_of_python_costs_the_host() -> None:
    told = Work.of([PASS, PASS], GRID, SYMBOLS, dispatched=5).seconds(
        Speed(RATES, asynchronous=False), passes=2
    )
    assert float(told["launch"][0]) == pytest.approx(2 * 1e-5 + 5 * 2 * RATES.pass_seconds)
    assert passes_of(Config(activation_checkpointing="selective"), "forward") == 2
    assert not passes_of(Config(activation_checkpointing="selective"), "backward")
    assert not passes_of(Config(activation_checkpointing="full"), "forward")


def test_compiled_code_moves_less() -> None:
    assert _seconds(PASS, compiled=True)["memory"] < _seconds(PASS)["memory"]
    assert _seconds(PRODUCT, compiled=True)["compute"] == _seconds(PRODUCT)["compute"]


def test_nothing_takes_no_time() -> None:
    assert set(_seconds().values()) == {0.0}
