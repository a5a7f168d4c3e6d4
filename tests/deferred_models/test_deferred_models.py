"""Deferred models in use: third-party models, jobs, optimizers, checkpoints, memory, and what is refused."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankless
from rankless.deferred_models.build_and_materialize import DeferredBuild, find_deferred

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=23, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=23, max_position_embeddings=8, **SMALL)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=23, **SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=23, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SMALL)),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=23, hidden_size=16, state_size=4, num_hidden_layers=2)
    ),
    "whisper": lambda: transformers.WhisperModel(
        transformers.WhisperConfig(
            vocab_size=23, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        )
    ),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_has_the_same_values(name: str):
    torch.manual_seed(3)
    plain = MODELS[name]()
    following = torch.rand(2)
    torch.manual_seed(3)
    with DeferredBuild() as build:
        model = MODELS[name]()
    assert torch.equal(torch.rand(2), following)
    assert find_deferred([model])
    build.materialize(model)
    assert not find_deferred([model])
    found, wanted = model.state_dict(), plain.state_dict()
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
    for (_, one), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(one, other)
    sharing = {key: value.data_ptr() for key, value in wanted.items()}
    for key, other in zip(wanted, list(wanted)[1:], strict=False):
        assert (found[key].data_ptr() == found[other].data_ptr()) == (sharing[key] == sharing[other])


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2))


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @rankless.job(model=model, optimizer=optimizer)
    def step(features, labels):
        return F.cross_entropy(model(features), labels)

    features, labels = torch.randn(4, 6, 3), torch.randint(0, 2, (4, 6))
    return [float(step(*batch)) for batch in zip(features, labels, strict=True)]


def test_the_first_call_of_a_job_computes_the_values():
    torch.manual_seed(5)
    wanted = train(make_model())
    torch.manual_seed(5)
    with rankless.deferred():
        model = make_model()
    assert train(model) == wanted


def test_a_checkpoint_restores_a_deferred_model(tmp_path):
    model = make_model()
    rankless.save(tmp_path / "one", model=model)
    with rankless.deferred():
        restored = make_model()
    rankless.load(tmp_path / "one", model=restored)
    for key, value in model.state_dict().items():
        assert torch.equal(restored.state_dict()[key], value)
    with rankless.deferred():
        other = make_model()
    rankless.save(tmp_path / "two", model=other)
    assert not find_deferred([other])


USES = {
    "forward": lambda model: model(torch.ones(4, 3)),
    "saving": lambda model: torch.save(model.state_dict(), "/dev/null"),
    "mixing": lambda model: model[0].weight + torch.ones(5, 3),
    "data": lambda model: setattr(model[0].weight, "data", torch.ones(5, 3)),
    "other block": lambda model: model[0].weight @ build_other(),
}


def build_other() -> torch.Tensor:
    with rankless.deferred():
        return torch.randn(3, 3)


@pytest.mark.parametrize("use", USES)
def test_a_use_that_needs_values_is_refused_with_its_line_and_a_way_out(use: str):
    with rankless.deferred() as build:
        model = make_model()
    with pytest.raises(rankless.RanklessError) as raised:
        USES[use](model)
    assert "rankless.deferred()" in str(raised.value.found)
    assert "materialize" in raised.value.fix
    assert "test_deferred_models.py" in str(raised.value.where)
    build.materialize(model)
    assert torch.isfinite(model(torch.ones(4, 3))).all()


def test_what_is_no_module_is_refused():
    with rankless.deferred() as build:
        model = make_model()
    with pytest.raises(rankless.errors.DeferredError, match="pass the model itself"):
        build.materialize(model.state_dict())


def test_an_error_in_the_block_ends_it():
    with pytest.raises(KeyError), rankless.deferred():
        raise KeyError("the script's own")
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_a_block_within_a_block():
    with rankless.deferred() as outer:
        one = nn.Linear(3, 3)
        with rankless.deferred():
            other = nn.Linear(3, 3)
    outer.materialize(one, other)
    assert not find_deferred([one, other])


def test_a_state_that_is_loaded_before_the_values_are_computed_is_kept():
    given = make_model().state_dict()
    with rankless.deferred() as build:
        model = make_model()
    model.load_state_dict(given)
    wanted = {key: value.clone() for key, value in given.items()}
    given["0.weight"].zero_()
    build.materialize(model)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in wanted.items())


def test_models_that_share_memory_share_it_although_their_values_are_computed_apart():
    with rankless.deferred() as build:
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        other.weight.data = one.weight.data
        part = one.weight[1:]
    build.materialize(one)
    build.materialize(other)
    with torch.no_grad():
        one.weight.fill_(3)
    assert torch.equal(other.weight, torch.full((4, 4), 3.0))
    assert torch.equal(part, torch.full((3, 4), 3.0))
    assert other.weight.data_ptr() == one.weight.data_ptr()


def test_a_copy_has_the_values_of_its_block_although_the_model_was_trained():
    with rankless.deferred() as build:
        model = nn.Linear(3, 2)
    teacher = copy.deepcopy(model)
    build.materialize(model)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    build.materialize(teacher)
    assert torch.equal(teacher.weight, before)


def test_what_python_reads_has_its_value_at_once():
    torch.manual_seed(1)
    with rankless.deferred():
        value = torch.rand(5)
        total, listed, array, biggest = value.sum().item(), value.tolist(), value.numpy(), bool(value.max() > 0)
        equal = torch.equal(value, value.clone())
    torch.manual_seed(1)
    plain = torch.rand(5)
    assert (total, listed, biggest, equal) == (plain.sum().item(), plain.tolist(), True, True)
    assert (array == plain.numpy()).all()


def test_a_model_changed_after_the_block_has_the_changes():
    torch.manual_seed(2)
    with rankless.deferred() as build:
        model = make_model()
    model.to(torch.float64)
    nn.init.ones_(model[0].bias)
    model[3].weight.requires_grad_(False)
    build.materialize(model)
    torch.manual_seed(2)
    plain = make_model().double()
    assert torch.equal(model[0].weight, plain[0].weight)
    assert torch.equal(model[0].bias, torch.ones(5, dtype=torch.float64))
    assert not model[3].weight.requires_grad


def test_a_tensor_that_the_script_changes_later_is_kept_as_it_was():
    given = torch.ones(3)
    with rankless.deferred() as build:
        model = nn.Linear(3, 3)
        with torch.no_grad():
            model.bias.copy_(given)
    given.zero_()
    build.materialize(model)
    assert torch.equal(model.bias, torch.ones(3))


def test_values_are_computed_after_the_generator_has_moved_on():
    torch.manual_seed(4)
    with rankless.deferred() as build:
        model = make_model()
    torch.manual_seed(99)
    torch.rand(3)
    before = torch.get_rng_state()
    build.materialize(model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(make_model()[3].weight, model[3].weight)


BIG = """
import resource, torch, rankless
from torch import nn

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.manual_seed(0)
with rankless.deferred() as build:
    model = nn.Linear(2, 2)  # imports what building needs
build.materialize(model)
before = peak()
with rankless.deferred() as build:
    model = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(20)])
    model.experts = nn.ParameterList(torch.randn(2000, 2000) for _ in range(10))
    model.noise = nn.ParameterList(torch.rand_like(item) for item in model.experts)
print(peak() - before)
build.materialize(model[7])
print(peak() - before, float(model[7].weight.sum()))
"""


@pytest.mark.exhaustive
def test_a_deferred_model_takes_the_memory_of_one_tensor():
    """640 MB of parameters, each of 16 MB."""
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, check=True)
    built, last = done.stdout.splitlines()
    computed, total = map(float, last.split())
    assert float(built) < 100
    assert computed < 150
    torch.manual_seed(0)
    nn.Linear(2, 2)
    plain = [nn.Linear(2000, 2000) for _ in range(8)]
    assert float(plain[7].weight.sum()) == total
