"""What the modelled step adds up, and that it runs the trainer's own step."""

import subprocess
import sys

import pytest

from tools.bench.roofline import Cost, Operator, Rates, costs, flops_of, kind_of, step_seconds
from tools.fake_cuda.library import compiler

RATES = Rates(products=100, attention=50, memory=10, launch=1)
STEP = """
from tools.bench import modelled
from tools.bench.roofline import Rates

found = {triton: modelled.modelled("gpt2-124m", 128, triton, Rates()) for triton in (False, True)}
for one in found.values():
    print(one.found["cross-entropy"].nbytes / modelled.TOKENS / one.plan.model.vocab)
    print(one.found["head's products"].flops / modelled.TOKENS / 6 / one.plan.model.vocab / one.plan.model.hidden)
"""
GOALS = """
from tools.bench import modelled
from tools.bench.roofline import Rates

for preset, sequence in modelled.CASES:
    print(modelled.modelled(preset, sequence, True, Rates()).mfu)
"""


@pytest.mark.parametrize(
    ("name", "inputs", "flops"),
    [
        ("mm", ((3, 4), (4, 5)), 2 * 3 * 4 * 5),
        # The result may be given too.
        ("addmm", ((3, 5), (3, 4), (4, 5), (3, 5)), 2 * 3 * 4 * 5),
        ("bmm", ((2, 3, 4), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        ("_scaled_dot_product_flash_attention", ((1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)), 2 * 4 * 8 * 8 * 16),
        ("_scaled_dot_product_flash_attention_backward", ((1, 4, 8, 16),) * 4, 5 * 4 * 8 * 8 * 16),
        ("add", ((3, 4), (3, 4)), 0),
    ],
)
def test_flops(name: str, inputs: tuple[tuple[int, ...], ...], flops: int) -> None:
    assert flops_of(Operator(name, inputs, (), 0)) == flops


@pytest.mark.parametrize(
    ("name", "shapes", "kind"),
    [
        ("mm", ((8, 4), (4, 61)), "head's products"),
        ("mm", ((8, 4), (4, 12)), "blocks' products"),
        ("cross_entropy_rows", ((8, 61),), "cross-entropy"),
        ("_log_softmax", ((8, 61),), "cross-entropy"),
        ("embedding_dense_backward", ((61, 4),), "other"),
        ("norm_forward", ((8, 4),), "norms"),
        ("adamw", ((100,),), "optimizer"),
    ],
)
def test_classes(name: str, shapes: tuple[tuple[int, ...], ...], kind: str) -> None:
    assert kind_of(Operator(name, shapes, (), 0), 61) == kind


def test_each_operator_takes_the_longer_of_both() -> None:
    product, copy = Operator("mm", ((10, 10), (10, 10)), (), 10), Operator("copy_", ((10,),), (), 40)
    found = costs([product, product, copy], 61, RATES)
    assert found == {"blocks' products": Cost(2, 4000, 20, 40), "other": Cost(1, 0, 40, 4)}
    assert step_seconds(found, RATES) == 44
    # The host is slower.
    assert step_seconds({"other": Cost(100, 0, 40, 4)}, RATES) == 100


def test_models_the_trainer_s_step() -> None:
    """Cross-entropy moves 6 bytes per logit, and with torch's operators more than 30. The head has three products."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler to build the device that computes nothing")
    ran = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    torch_bytes, torch_flops, own_bytes, own_flops = map(float, ran.stdout.split())
    assert 6 <= own_bytes < 6.6
    assert torch_bytes > 30
    # With 47 logits of padding in each row.
    assert own_flops == torch_flops == pytest.approx(50304 / 50257)


@pytest.mark.soak
def test_the_modelled_steps_reach_their_goals() -> None:
    """Of the datasheet's FLOPs, half for 124M and 54% for 1B: the same rates of the roofline give 61% without anything
    but products and attention."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler to build the device that computes nothing")
    ran = subprocess.run([sys.executable, "-c", GOALS], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    reached = [float(line) for line in ran.stdout.split()]
    assert len(reached) == 4
    assert min(reached[:2]) >= 0.5
    assert min(reached[2:]) >= 0.54
