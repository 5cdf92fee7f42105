"""How answers are judged equal (float32): ids step by step, near ties counted.

At the first difference the cold run's log probabilities decide: two ids that differ by less than
1e-3 there are a near tie, and the comparison of that sequence ends; anything else fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from client import Client, Reply

NEAR_TIE = 1e-3
TOKENS_A_NEAR_TIE = 2000
FORCED_CLOSE = "\n</think>\n\n"  # what closes a block where the template has nothing of its own


class Judge:
    """Compares replies with those of `cold`, a process that knows nothing; counts near ties."""

    def __init__(self, cold: Client, **options: Any) -> None:
        """`options` are those that the replies were asked with besides their input."""
        self._cold = cold
        self._options = options
        self.num_tokens = 0
        self.near_ties: list[str] = []

    async def check(self, reply: Reply, what: str, *, answer: bool = True) -> None:
        """A reply against cold runs of the same effective ids.

        Its reasoning (or all of it) against a cold run of the effective prompt; after a block
        that the server closed, the `answer` against a cold run of all that came before it.
        """
        close = await self._cold.encode(FORCED_CLOSE)
        sampled, forced, rest = _split(reply.token_ids, close)
        if sampled:
            self.compare(sampled, await self.cold_reply(reply.prompt_ids, len(sampled)), what)
        if rest and answer:
            ids = [*reply.prompt_ids, *sampled, *forced]
            self.compare(rest, await self.cold_reply(ids, len(rest)), f"{what}, answer")

    async def cold_reply(self, ids: Sequence[int], max_tokens: int) -> Reply:
        """What the cold process answers to these ids."""
        reply = await self._cold.tokens(
            ids, max_tokens=max_tokens, logprobs=20, bypass=True, **self._options
        )
        assert reply.admission == "cold"
        assert reply.prompt_ids == list(ids)
        return reply

    def compare(self, warm: Sequence[int], cold: Reply, what: str) -> None:
        """`cold` carries token ids and log probabilities of every step."""
        steps = [step for delta in cold.deltas for step in delta.logprobs]
        for i, (ours, theirs) in enumerate(zip(warm, cold.token_ids, strict=False)):
            self.num_tokens += 1
            if ours == theirs:
                continue
            known = {top.token_id: top.logprob for top in steps[i].top}
            known[steps[i].sampled.token_id] = steps[i].sampled.logprob
            assert ours in known, f"{what}: step {i}: {ours} is not among the likeliest of cold"
            gap = abs(known[ours] - known[theirs])
            assert gap < NEAR_TIE, f"{what}: step {i}: {ours} against {theirs}, {gap:.2e} apart"
            self.near_ties.append(f"{what}: step {i}: {gap:.1e}")
            return
        assert len(warm) == len(cold.token_ids), (
            f"{what}: {len(warm)} tokens against {len(cold.token_ids)} of cold"
        )

    def finish(self, at_least: int = 1) -> None:
        """Enough was compared, with at most one near tie a 2,000 tokens (one in fewer)."""
        assert self.num_tokens >= at_least
        assert len(self.near_ties) <= 1 + self.num_tokens // TOKENS_A_NEAR_TIE, self.near_ties


def _split(ids: list[int], close: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Ids before the forced close, the close, and after it; without one all are before it."""
    for start in range(len(ids) - len(close) + 1):
        if ids[start : start + len(close)] == close:
            return ids[:start], close, ids[start + len(close) :]
    return ids, [], []
