"""Tiny models of the transformers library, without downloads, against the plain script."""

import pytest
import torch
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact, sample_cases

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

WORDS = 23
LENGTH = 6
ROWS = (5,) * 18 + (3, 5)


def make_script(model, loss):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def text(rows):
    words = torch.randint(1, WORDS, (rows, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (rows, 1))
    seen = (torch.arange(LENGTH) < lengths).long()
    return {"words": words * seen, "seen": seen}


def pictures(rows):
    return {"pictures": torch.randn(rows, 3, 8, 8), "labels": torch.randint(0, 4, (rows,))}


def gpt2():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )

    # The model's own loss is in float32, whatever its parameters are.
    def loss(words, seen):
        logits = model(input_ids=words, attention_mask=seen, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), ignore_index=0)

    return make_script(model, loss)


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
    )
    model = transformers.BertForMaskedLM(config)

    def loss(words, seen):
        labels = words.masked_fill(words % 2 == 0, -100)
        hidden = words.masked_fill(words % 2 == 1, 1)
        out = model(input_ids=hidden, attention_mask=seen, labels=labels)
        return out.loss, out.logits

    return make_script(model, loss)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)

    def loss(words, seen):
        labels = words.masked_fill(seen == 0, -100)
        return model(input_ids=words, attention_mask=seen, labels=labels, use_cache=False).loss

    return make_script(model, loss)


def vit():
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=4,
    )
    model = transformers.ViTForImageClassification(config)
    return make_script(model, lambda pictures, labels: {"loss": model(pixel_values=pictures, labels=labels).loss})


KEYS = ("key.bias", "k_proj.bias")
SCENARIOS = [
    Scenario(build=gpt2, batch=text, rows=ROWS),
    Scenario(build=bert, batch=text, rows=ROWS, vanishing=KEYS),
    Scenario(build=llama, batch=text, rows=ROWS, dtypes=(torch.float32,)),
    Scenario(build=vit, batch=pictures, rows=ROWS, vanishing=KEYS),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("scenario", "workers", "dtype"), sample_cases(SCENARIOS, 2, 3))
def test_losses_gradients_and_parameters_equal_the_plain_scripts(scenario, workers, dtype):
    assert_exact(scenario, workers, dtype)
