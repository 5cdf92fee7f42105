"""Texts for tests, made from a seed: long enough, not repetitive, nobody's words."""

from __future__ import annotations

import random

_SUBJECTS = (
    "The build server,The release branch,A failing test,The night watch,Every reviewer,"
    "The parser,An old driver,The harbour office,Our gardener,The second engine,A young clerk,"
    "The mountain road,Each module,The archive,The river pump,A visitor"
).split(",")
_VERBS = (
    "keeps,checks,rewrites,follows,reports,closes,measures,moves,describes,replaces,watches,"
    "orders,paints,opens,counts,refuses"
).split(",")
_OBJECTS = (
    "the north gate,three green lamps,a list of names,the cache folder,an empty queue,"
    "the wooden bridge,two signed letters,the error budget,a map of the coast,the spare key,"
    "the quarterly plan,a broken clock,the longest table,every open issue,the water level,"
    "a box of maps"
).split(",")
_ENDS = (
    "before sunrise,when nobody asks,on the first of the month,after the bell,with great care,"
    "in the blue room,without a word,every other week,until the rain stops,as the rules say,"
    "near the old mill,for the third time"
).split(",")


def sentences(count: int, seed: int) -> str:
    """`count` numbered sentences; about 15 tokens each."""
    draw = random.Random(seed)
    return " ".join(
        f"{i + 1}. {draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}"
        f" {draw.choice(_ENDS)}."
        for i in range(count)
    )


def preamble(count: int, seed: int) -> str:
    """A system prompt of about 15 tokens for each of `count` sentences."""
    return f"You are a careful assistant. House rules follow. {sentences(count, seed)}"


def question(seed: int) -> str:
    """A short user message, different for each seed."""
    draw = random.Random(seed)
    return (
        f"Question {seed}: who {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}"
        f" {draw.choice(_ENDS)}? Answer in one short sentence."
    )
