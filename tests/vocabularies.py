"""Small real tokenizers for the real chat templates of the llama-cpp-python sdist.

Each knows the control tokens that its template writes, so that structure is made of tokens as it
is with the model's own vocabulary.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from sources import llama_cpp_source

from ds4grpc.chat.renderer import Renderer
from ds4grpc.chat.template import Template
from ds4grpc.errors import InvalidRequest
from ds4grpc.tokenizer import Tokenizer

# Spellings that models of these templates have as control tokens.
_CONTROLS = re.compile(
    r"<\|[^<>\s'\"{}|]{1,40}\|?>|<[a-z_]{1,20}\|>|<｜[^<>\s'\"{}]{1,60}｜>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS|CALL_ID"
    r"|TOOL_CONTENT|IMG|THINK)\]"
    r"|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>|<(?:beginning|end)_of_sentence>"
    r"|\]~!?b[\]\[]|\[e~\[|</?seed:[a-z_]+>|<SPECIAL_\d+>|<sep>|</?role>"
)
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "[e~[", "<｜end▁of▁sentence｜>")
_MERGES = (
    "t h", "h e", "i n", "e r", "a n", "Ġ t", "Ġ a", "Ċ Ċ", "< /", "n k", "| >", "< |", "> Ċ",
    "l l", "> <",
)  # fmt: skip


def template_names() -> list[str]:
    """Names of the real templates, sorted."""
    return sorted(path.stem for path in _folder().glob("*.jinja"))


def template_source(name: str) -> str:
    return (_folder() / f"{name}.jinja").read_text()


@functools.cache
def renderer(name: str) -> Renderer:
    """The renderer of a real template, with a small vocabulary that fits it."""
    source = template_source(name)
    return Renderer(source, tokenizer_for(source))


def tokenizer_for(source: str, *, user_defined: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE with every byte, a few merges and the control tokens of `source`."""
    controls = sorted({"<s>", "</s>", *_CONTROLS.findall(source), *_written(source)})
    pairs = [tuple(merge.split(" ")) for merge in _MERGES]
    plain = [*_byte_characters(), *(left + right for left, right in pairs)]
    tokens = [*plain, *controls, *user_defined]
    end = next((spelling for spelling in _ENDS if spelling in controls), "</s>")
    return Tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": (
                [1] * len(plain) + [3] * len(controls) + [4] * len(user_defined)
            ),
            "tokenizer.ggml.merges": list(_MERGES),
            "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
            "tokenizer.ggml.eos_token_id": tokens.index(end),
            "tokenizer.ggml.add_bos_token": True,
        }
    )


def _written(source: str) -> list[str]:
    """Control tokens that a template puts together, so that they are not in its text."""
    if ".format(" not in source:
        return []
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = Template(source).render({"messages": messages, "add_generation_prompt": True})
    except InvalidRequest:
        return []
    return _CONTROLS.findall(text)


def _folder() -> Path:
    return llama_cpp_source() / "models" / "templates"


def _byte_characters() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b if b in printable else 0x100 + others.index(b)) for b in range(256)]
