"""Presets have the published sizes."""

import pytest
from llmtrain.model.presets import PRESETS
from llmtrain.model.tensors import parameter_count

# Parameters of the released weights, exactly.
EXACT = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
}

# Billions of parameters as a paper prints them, and our largest allowed distance: half of the last printed digit,
# except for AxoNN, MiCS and GPT-3, whose figures are names of sizes more than counts.
ROUNDED = {
    "gpt3-125m": (0.125, 0.0005),
    "gpt3-350m": (0.35, 0.006),
    "gpt3-760m": (0.76, 0.005),
    "gpt3-1.3b": (1.3, 0.05),
    "gpt3-2.7b": (2.7, 0.05),
    "gpt3-6.7b": (6.7, 0.05),
    "gpt3-13b": (13, 0.5),
    "gpt3-175b": (175, 0.5),
    "deepspeed-1.4b": (1.4, 0.05),
    "deepspeed-4.4b": (4.4, 0.05),
    "deepspeed-5.2b": (5.2, 0.05),
    "deepspeed-5.5b": (5.5, 0.05),
    "deepspeed-6.6b": (6.6, 0.05),
    "deepspeed-11.4b": (11.4, 0.05),
    "deepspeed-33.3b": (33.3, 0.05),
    "axonn-12b": (12, 0.5),
    "axonn-24b": (24, 0.6),
    "axonn-50b": (50, 0.6),
    "axonn-100b": (100, 1.5),
    "mics-10b": (10, 0.5),
    "mics-15b": (15, 0.5),
    "mics-20b": (20, 0.5),
    "mics-50b": (50, 0.5),
    "mics-gpt2-20b": (20, 0.5),
    "holmes-3.6b": (3.6, 0.05),
    "holmes-7.5b": (7.5, 0.05),
    "holmes-39.1b": (39.1, 0.05),
}

SMALL = [name for name in PRESETS if name not in EXACT and name not in ROUNDED]


@pytest.mark.parametrize("name", EXACT)
def test_released_models_to_the_last_parameter(name: str) -> None:
    assert parameter_count(PRESETS[name]) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_papers_models_within_their_rounding(name: str) -> None:
    published, tolerance = ROUNDED[name]
    assert abs(parameter_count(PRESETS[name]) / 1e9 - published) <= tolerance


@pytest.mark.parametrize("name", SMALL)
def test_small_models_are_what_their_name_says(name: str) -> None:
    published = float(name.rpartition("-")[2].removesuffix("m"))
    assert parameter_count(PRESETS[name]) / 1e6 == pytest.approx(published, rel=0.1)


def test_sizes_reach_from_1m_to_175b() -> None:
    counts = [parameter_count(config) for config in PRESETS.values()]
    assert min(counts) < 1.1e6
    assert max(counts) > 174e9
