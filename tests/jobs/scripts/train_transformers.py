"""Train a model of transformers, made from its configuration, as the library has it."""

import argparse

import torch

import rankless

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["gpt2", "bert", "llama", "t5", "vit"], required=True)
options = parser.parse_args()
WORDS, LENGTH, ROWS = 47, 10, 22


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - one model needs one import

    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4))


def make_bert():
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, intermediate_size=64, **heads)
    )


def make_t5():
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0, **sizes))


def make_vit():
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=12, patch_size=4, num_channels=1, num_labels=5, **sizes))


torch.manual_seed(0)
model = globals()[f"make_{options.model}"]()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@rankless.job(model=model, optimizer=optimizer, clip_norm=1.0)
def train(inputs, labels):
    if options.model == "vit":
        return model(pixel_values=inputs, labels=labels).loss
    return model(input_ids=inputs, labels=labels).loss


inputs = torch.randn(ROWS, 1, 12, 12) if options.model == "vit" else torch.randint(1, WORDS, (ROWS, LENGTH))
labels = torch.randint(0, 5, (ROWS,)) if options.model == "vit" else inputs
data = torch.utils.data.TensorDataset(inputs, labels)
for batch in rankless.loader(data, batch_size=8, shuffle=True):
    loss = train(*batch)
print(f"loss {float(loss):.6f}")
