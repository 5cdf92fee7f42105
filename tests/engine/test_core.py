"""Replies on a real engine: what is committed, what is sent, what is counted, what is found again.

The model says what it is told, so each reply can be read; nothing else is put on.
"""

from __future__ import annotations

from asyncio import gather
from dataclasses import replace

from inprocess import Answer, Rig, TinyModel, running

from ds4grpc.bank import Admission, RecordKind, Waypoint
from ds4grpc.chat.prompt import Channel
from ds4grpc.engine.request import Delta, FinishReason

TOWER = "What is the tallest tower here?"
WIDEST = "And the widest?"
MILL = "The old mill."
WHY = "It is high."
CLOSE = "\n</think>\n\n"


async def think(rig: Rig) -> Answer:
    """A first turn with reasoning, which ends by itself."""
    prompt = rig.chat(TOWER, thinking=True)
    rig.say(len(prompt.ids), f"{WHY}{CLOSE}{MILL}")
    return await rig.ask(prompt, 60)


async def test_end_marker_is_neither_sent_nor_committed_nor_in_the_key(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER)
        said = rig.say(len(prompt.ids), MILL)
        answer = await rig.ask(prompt, 20)
        bank = await rig.bank()
        assert answer.finished.finish_reason is FinishReason.STOP
        assert (answer.ids, answer.said()) == (said, MILL)
        assert answer.finished.usage.generated_tokens == len(said) + 1
        assert bank.ids.tolist() == [*prompt.ids.tolist(), *said]
        (record,) = bank.records
        assert record.kind is RecordKind.RAW
        assert record.key == prompt.text + MILL.encode()
        assert record.end == Waypoint(len(record.key), bank.frontier)


async def test_next_turn_pays_only_for_what_follows_the_reply(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        first = rig.chat(TOWER)
        rig.say(len(first.ids), MILL)
        await rig.ask(first, 20)
        bank = await rig.bank()
        second = rig.chat(TOWER, MILL, WIDEST)
        answer = await rig.ask(second, 20)
        started = answer.started
        assert (started.admission, started.miss_reason) == (Admission.WARM, None)
        assert started.pos_base == bank.frontier
        assert started.suffix_tokens == len(second.ids) - bank.frontier
        assert list(started.prompt_token_ids) == second.ids.tolist()
        assert answer.ids == await rig.cold(answer)


async def test_record_ends_with_the_last_committed_token(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        first = rig.chat(TOWER)
        said = rig.say(len(first.ids), "The old mill by the river")
        answer = await rig.ask(first, 4)
        bank = await rig.bank()
        assert answer.finished.finish_reason is FinishReason.LENGTH
        assert answer.ids == said[:4]  # the last one was sent, but nothing was computed after it
        assert bank.ids.tolist() == [*first.ids.tolist(), *said[:3]]
        (record,) = bank.records
        assert record.key == first.text + b"The old mill"
        assert record.end == Waypoint(len(record.key), bank.frontier)
        answer = await rig.ask(rig.chat(TOWER, answer.said(), WIDEST))
        assert answer.started.admission is Admission.WARM
        assert answer.started.pos_base == bank.frontier
        assert answer.ids == await rig.cold(answer)


async def test_hidden_reasoning_is_kept_in_the_bank_and_left_out_of_the_key(
    tiny: TinyModel,
) -> None:
    async with running(tiny) as rig:
        answer = await think(rig)
        bank = await rig.bank()
        prompt = rig.chat(TOWER, thinking=True)
        assert (answer.said(Channel.REASONING), answer.said()) == (WHY, MILL)
        ((start, end),) = bank.hidden.pairs
        assert start == len(prompt.ids) - prompt.open_tokens
        hidden = rig.checkpoint.tokenizer.decode(bank.ids[start:end].tolist())
        assert hidden == f"<think>\n{WHY}\n</think>"
        visible = [r for r in bank.records if r.kind is RecordKind.VISIBLE]
        assert [r.key for r in visible] == [prompt.text[: prompt.open_at] + MILL.encode()]
        assert all(r.end is not None and r.end.position == bank.frontier for r in bank.records)


async def test_cached_tokens_are_counted_as_the_client_counts(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        await think(rig)
        bank = await rig.bank()
        second = rig.chat(TOWER, MILL, WIDEST, thinking=True)
        answer = await rig.ask(second)
        started, usage = answer.started, answer.finished.usage
        assert started.admission is Admission.WARM
        assert started.pos_base == bank.frontier
        assert started.prompt_tokens == usage.prompt_tokens == len(second.ids)
        assert started.memory_tokens == usage.cached_tokens
        assert started.memory_tokens == len(second.ids) - started.suffix_tokens < bank.frontier
        assert started.hidden_tokens == len(started.prompt_token_ids) - len(second.ids)
        assert started.hidden_tokens > len(rig.checkpoint.tokenizer.plain_ids(WHY))
        assert answer.ids[:4] == await rig.cold(answer, 4)  # then the block is closed by force


async def test_spent_budget_closes_the_block_and_its_tokens_do_not_count(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER, thinking=True, budget=3)
        close = list(prompt.form.forced_close)
        at = len(prompt.ids)
        why = rig.say(at, "one two three four five", end=False)[:3]
        for position in range(at + 3, at + 5):
            del rig.model.says[position]
        said = rig.say(at + 3 + len(close), "The old mill by the river", end=False)[:5]
        answer = await rig.ask(prompt, 8)
        usage = answer.finished.usage
        assert answer.ids == [*why, *close, *said]
        assert (answer.said(Channel.REASONING), answer.said()) == (
            "one two three",
            "The old mill by the",
        )
        assert (usage.reasoning_tokens, usage.generated_tokens) == (3, 8)
        assert rig.count("ds4grpc_generated_tokens_total") == 8
        assert (await rig.bank()).ids.tolist() == [*prompt.ids.tolist(), *answer.ids[:-1]]


async def test_end_marker_in_the_block_closes_it_and_the_answer_follows(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER, thinking=True)
        close = list(prompt.form.forced_close)
        at = len(prompt.ids)
        why = rig.say(at, WHY)
        said = rig.say(at + len(why) + len(close), MILL)
        answer = await rig.ask(prompt, 60)
        assert answer.ids == [*why, *close, *said]
        assert (answer.said(Channel.REASONING), answer.said()) == (WHY, MILL)
        assert answer.finished.finish_reason is FinishReason.STOP
        usage = answer.finished.usage
        # Both end markers were sampled; neither is anywhere in the bank's reply.
        assert usage.reasoning_tokens == len(why) + 1
        assert usage.generated_tokens == len(why) + 1 + len(said) + 1
        assert (await rig.bank()).ids.tolist() == [*prompt.ids.tolist(), *answer.ids]


async def test_unset_budget_leaves_half_of_the_tokens_for_the_answer(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER, thinking=True)
        answer = await rig.ask(prompt, 11)
        close = list(prompt.form.forced_close)
        assert answer.ids[6 : 6 + len(close)] == close
        assert answer.finished.usage.reasoning_tokens == 6
        assert answer.finished.usage.generated_tokens == 11


async def test_reply_that_ends_inside_the_block_gets_a_prompt_key(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER, thinking=True, budget=100)
        rig.say(len(prompt.ids), "It is high and", end=False)
        await rig.ask(prompt, 4)
        (record,) = (await rig.bank()).records
        assert record.kind is RecordKind.PROMPT
        assert record.key == prompt.text[: prompt.open_at]
        assert rig.count("ds4grpc_records_total", "prompt", "on", "prompt") == 1


async def test_stop_string_cuts_the_bank_to_what_was_received(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER)
        said = rig.say(len(prompt.ids), "The old mill by the river bank")
        answer = await rig.ask(prompt, 20, stop=("the river",))
        assert (answer.finished.finish_reason, answer.finished.matched_stop) == (
            FinishReason.STOP,
            "the river",
        )
        assert answer.said() == "The old mill by "
        bank = await rig.bank()
        kept = rig.checkpoint.tokenizer.decode(bank.ids[len(prompt.ids) :].tolist())
        assert bank.ids.tolist() == [*prompt.ids.tolist(), *said[:4]]
        assert kept == "The old mill by"
        (record,) = bank.records
        assert record.key == prompt.text + b"The old mill by"


async def test_stop_id_is_not_committed(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER)
        said = rig.say(len(prompt.ids), "The old mill by", end=False)
        answer = await rig.ask(prompt, 20, stop_ids=frozenset([said[2]]))
        assert answer.ids == said[:2]
        assert answer.finished.matched_stop == str(said[2])
        assert (await rig.bank()).ids.tolist() == [*prompt.ids.tolist(), *said[:2]]


async def test_no_tokens_wanted_prefills_and_keeps_the_prompt(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(TOWER)
        answer = await rig.ask(prompt, 0)
        assert answer.finished.finish_reason is FinishReason.LENGTH
        assert not [event for event in answer.events if isinstance(event, Delta)]
        assert (await rig.bank()).ids.tolist() == prompt.ids.tolist()
        again = await rig.ask(prompt)
        assert again.started.pos_base == len(prompt.ids) - 1
        assert again.ids == await rig.cold(again)


async def test_context_ends_a_reply_and_every_place_in_it_is_used(tiny: TinyModel) -> None:
    prompt = tiny.prompts.from_ids(tiny.prompts.from_text(TOWER * 8).ids[:50])
    async with running(tiny, max_context=60) as rig:
        answer = await rig.ask(prompt, None)
        assert answer.finished.finish_reason is FinishReason.LENGTH
        assert len(answer.ids) == 11  # the last one is not committed, so it needs no place
        assert (await rig.bank()).frontier <= 60


async def test_text_and_ids_are_continued_by_the_same_rules(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        text = rig.prompts.from_text("Once upon a time there was a tower")
        said = rig.say(len(text.ids), " by the river", end=False)
        await rig.ask(text, len(said))
        bank = await rig.bank()
        longer = rig.prompts.from_text("Once upon a time there was a tower by the river, and it")
        answer = await rig.ask(longer)
        assert answer.started.admission is Admission.WARM
        assert answer.started.pos_base == bank.frontier
        assert answer.ids == await rig.cold(answer)


async def test_sampled_text_is_the_same_alone_and_beside_others(tiny: TinyModel) -> None:
    async with running(tiny, slots=3) as rig:
        requests = []
        for seed, place in enumerate(("here", "there", "nearby")):
            request = rig.request(rig.chat(f"What is the tallest tower {place}?"), 20, bypass=True)
            sampling = replace(request.sampling, temperature=1.5, seed=seed)
            requests.append(replace(request, sampling=sampling))
        alone = [(await rig.answer(request)).ids for request in requests]
        assert len({tuple(ids) for ids in alone}) == 3
        together = await gather(*(rig.answer(request) for request in requests))
        assert [answer.ids for answer in together] == alone
