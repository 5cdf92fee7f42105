"""Writes the golden logits of SmolLM2: what transformers computes from the same GGUF file.

Run by hand from the repository's root (8 minutes on two slow cores), with SmolLM2 pulled, in an
environment that has `torch==2.13.0`, `transformers==5.24.0`, `gguf`, `tokenizers`, `numpy`:

    PYTHONPATH=. python tests/goldens/make_logits.py

The result, `smollm2_logits.npz` beside this file, is committed; tests need no transformers. For
each prompt it holds, as `<prompt>.<field>`:

    text      the prompt in escaped form
    ids       its token ids (T,)
    last      logits after the last token (V,), rounded to 2^-13 so that they compress
    at        positions drawn from the prompt (P,)
    at_ids    the eight likeliest next tokens there (P, 8)
    at_logits and their logits (P, 8)
    greedy    64 greedy ids
    second    the runner-up at each of those steps
    margin    by how much it lost
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ds4grpc.model.gguf import read_gguf
from ds4grpc.model.registry import resolve
from ds4grpc.tokenizer import Tokenizer

_SEED = 20261130
_NUM_STEPS = 64
_NUM_POSITIONS = 16
_LONG_TOKENS = 2000
_ROUNDING = 2.0**13

_NOUNS = (
    "river engine table garden window letter market bridge signal doctor planet archive".split()
)
_VERBS = "finds carries measures repairs describes follows paints counts forgets answers".split()
_ADJECTIVES = "quiet broken distant golden careful hollow sudden patient narrow bright".split()
_TOPICS = "tides, glaciers, compilers, bread, maps, orchards, clocks, sails".split(", ")
_NAMES = "total index buffer cursor weight offset result record".split()
_GERMAN = "der Fluss, die Brücke, ein Garten, das Fenster, mein Brief, größer, schön, über".split(
    ", "
)
_CHINESE = "河流 花园 窗户 信号 桥梁 医生 安静 遥远 仔细 明亮".split()
_RUSSIAN = "река сад окно письмо мост врач тихий далёкий яркий терпеливый".split()
_ARABIC = "نهر حديقة نافذة رسالة جسر طبيب هادئ بعيد".split()


def _prompts() -> dict[str, str]:
    draw = random.Random(_SEED)
    return {
        "short.1": f"The {draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}",
        "short.2": f"A note on {draw.choice(_TOPICS)}:",
        "short.3": "1 + 1 = 2, 2 + 2 =",
        "long.1": " ".join(_sentence(draw) for _ in range(400)),
        "long.2": "\n\n".join(_paragraph(draw) for _ in range(80)),
        "german": f"{' '.join(draw.choices(_GERMAN, k=30))}. Warum",
        "chinese": "。".join("".join(draw.choices(_CHINESE, k=6)) for _ in range(12)),
        "russian_arabic": ": ".join(
            " ".join(draw.choices(words, k=25)) for words in (_RUSSIAN, _ARABIC)
        ),
        "code.python": "\n\n".join(_function(draw) for _ in range(8)) + "\n\ndef ",
        "code.json": _records(draw),
        "chat.1": _chat(draw, 1),
        "chat.2": _chat(draw, 4),
    }


def _sentence(draw: random.Random) -> str:
    subject = f"{draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}"
    thing = f"{draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}"
    return f"The {subject} {draw.choice(_VERBS)} the {thing} in {draw.randrange(1700, 2100)}."


def _paragraph(draw: random.Random) -> str:
    title = f"{draw.choice(_NOUNS).title()} and {draw.choice(_TOPICS)}"
    return f"## {title}\n" + " ".join(_sentence(draw) for _ in range(draw.randrange(2, 5)))


def _function(draw: random.Random) -> str:
    name, left, right = draw.sample(_NAMES, 3)
    return (
        f"def {name}_of({left}: int, {right}: list[int]) -> int:\n"
        f"    for item in {right}:\n        {left} += item * {draw.randrange(100)}\n"
        f"    return {left} % {draw.randrange(2, 1000)}"
    )


def _records(draw: random.Random) -> str:
    rows = [f'{{"{draw.choice(_NAMES)}": {draw.random():.4f}, "id": {i}}}' for i in range(25)]
    return "[\n  " + ",\n  ".join(rows) + ",\n  {"


def _chat(draw: random.Random, num_turns: int) -> str:
    turns = ["<|im_start|>system\nYou answer in one sentence.<|im_end|>\n"]
    for turn in range(num_turns):
        turns.append(
            f"<|im_start|>user\nWhat should I know about {draw.choice(_TOPICS)}?<|im_end|>\n"
        )
        turns.append("<|im_start|>assistant\n")
        if turn + 1 < num_turns:
            turns.append(f"{_sentence(draw)}<|im_end|>\n")
    return "".join(turns)


@torch.inference_mode()
def _golden(model: torch.nn.Module, ids: list[int], draw: random.Random) -> dict[str, np.ndarray]:
    out = model(torch.tensor([ids]), use_cache=True)
    logits = out.logits[0]  # (T, V)
    at = sorted(draw.sample(range(len(ids)), min(_NUM_POSITIONS, len(ids))))
    best = logits[at].topk(8)
    golden = {
        "ids": np.array(ids, dtype=np.uint16),
        "last": np.round(logits[-1].numpy() * _ROUNDING) / np.float32(_ROUNDING),
        "at": np.array(at, dtype=np.uint16),
        "at_ids": best.indices.numpy().astype(np.uint16),
        "at_logits": best.values.numpy(),
    }
    steps: list[tuple[int, int, float]] = []
    row = logits[-1]
    for _ in range(_NUM_STEPS):
        top = row.topk(2)
        first, second = top.indices.tolist()
        steps.append((first, second, float(top.values[0] - top.values[1])))
        out = model(torch.tensor([[first]]), past_key_values=out.past_key_values, use_cache=True)
        row = out.logits[0, -1]
    golden["greedy"] = np.array([step[0] for step in steps], dtype=np.uint16)
    golden["second"] = np.array([step[1] for step in steps], dtype=np.uint16)
    golden["margin"] = np.array([step[2] for step in steps], dtype=np.float32)
    return golden


def main() -> None:
    path = resolve("smollm2")
    tokenizer = Tokenizer(read_gguf(path).metadata)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    draw = random.Random(_SEED)
    fields: dict[str, Any] = {}
    for name, text in _prompts().items():
        ids = tokenizer.encode(text)
        if name.startswith("long"):
            ids = ids[:_LONG_TOKENS]
            text = tokenizer.decode(ids)
        golden = _golden(model, ids, draw)
        fields |= {f"{name}.{field}": value for field, value in golden.items()}
        fields[f"{name}.text"] = np.array(text)
    np.savez_compressed(Path(__file__).with_name("smollm2_logits.npz"), **fields)


if __name__ == "__main__":
    main()
