# SPDX-License-Identifier: Apache-2.0
"""Makes the model to fine-tune: a tiny Llama that transformers trains a little.

Owns its tokenizer, its sizes and that first training. Does not own the fine-tuning data
(`chats.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch  # pyright: ignore[reportMissingImports]
import transformers as hf  # pyright: ignore[reportMissingImports]
from tokenizers import decoders, models, pre_tokenizers, trainers

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
VOCAB_SIZE, MAX_SEQ_LEN = 384, 128
_STEPS, _BATCH, _WINDOW, _RATE = 80, 8, 32, 3e-3


def make_base_model(folder: Path, texts: Sequence[str], seed: int = 0) -> None:
    """Make it, train it on the texts a little, and save it with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = _tokenizer(texts)
    model = hf.LlamaForCausalLM(_config(tokenizer))
    _train(model, torch.tensor(tokenizer("\n".join(texts))["input_ids"]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(texts: Sequence[str]) -> hf.PreTrainedTokenizerFast:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _config(tokenizer: hf.PreTrainedTokenizerFast) -> hf.LlamaConfig:
    return hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_SEQ_LEN,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _train(model: hf.LlamaForCausalLM, tokens_T: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    for _ in range(_STEPS):
        starts = torch.randint(len(tokens_T) - _WINDOW, (_BATCH,)).tolist()
        tokens_BL = torch.stack([tokens_T[at : at + _WINDOW] for at in starts])
        loss = model(tokens_BL, labels=tokens_BL).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
