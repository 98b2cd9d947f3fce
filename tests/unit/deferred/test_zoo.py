"""A part of the zoo: all modules of torch's own tests, some transformers configurations of each
kind.

``python tests/zoo_check.py`` checks all of it, in every shard.
"""

from __future__ import annotations

import pytest

from torchrelay.world import World

# Constructor calls of one module that differ in little: at most so many.
CALLS = 6

# Text, vision, audio, several of these; encoders, decoders, both; attention, convolution,
# recurrence, state space, experts; learned, rotary and relative positions; tied weights;
# initialisations that draw until they are content.
CONFIGURATIONS = (
    "albert", "bamba", "bark", "bart", "beit", "bert", "big_bird", "blip", "bloom", "canine",
    "clip", "clvp", "codegen", "convbert", "convnext", "cvt", "dac", "data2vec-audio", "deberta-v2",
    "deepseek_v3", "detr", "dinov2", "dpt", "efficientnet", "encodec", "falcon", "falcon_mamba",
    "fnet", "focalnet", "funnel", "gemma3", "gpt2", "gpt_neo", "gpt_oss", "hiera", "ibert", "jamba",
    "levit", "llama", "longt5", "lxmert", "mamba2", "mask2former", "mimi", "mixtral", "mobilevit",
    "mpnet", "nystromformer", "perceiver", "qwen3_next", "recurrent_gemma", "reformer", "regnet",
    "rwkv", "sam", "segformer", "speecht5", "swin", "t5", "tapas", "univnet", "vit", "vits",
    "wav2vec2", "whisper", "xlnet", "xlstm", "yolos", "zamba2",
)  # fmt: skip


@pytest.mark.processes(1)
def test_every_module_of_torch(world: World) -> None:
    """In a process of its own: torch's test helpers change global flags when they are imported."""
    import warnings
    from collections import Counter

    import zoo
    import zoo_check

    warnings.simplefilter("ignore")
    seen: Counter[str] = Counter()
    failures = []
    for case in zoo.torch_cases():
        module = case.name.rsplit("-", 1)[0]
        seen[module] += 1
        if seen[module] > CALLS:
            continue
        try:
            zoo_check.check(case, all_shards=False)
        except Exception as error:
            failures.append(f"{case}: {zoo.reason(error)}")
    assert len(seen) > 100
    assert not failures, "\n".join(failures)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_transformers(name: str) -> None:
    import zoo
    import zoo_check

    (case,) = zoo.transformers_cases([name])
    if isinstance(case, tuple):
        pytest.skip(f"does not build eagerly: {case[1]}")
    try:
        zoo_check.check(case, all_shards=False)
    except zoo_check.DifferentError:
        if zoo_check.is_reproducible(case):
            raise
        # Before 2.13, torch leaves the bias of a convolution of no channels as it is in memory.
        pytest.skip("eager construction leaves memory uninitialized")
