"""Cases at the edges: of the context, of a stream, of what a request may ask for."""

from __future__ import annotations

from .case import Finding, case, failed, forced, inapplicable, passed, unclear
from .target import TEXT, Answer, Body, Broken, Refused, Subject, joined, streamed

_LONGEST = 16_384  # tokens of context that are filled
_ODD = "👩‍🚀 naïve 漢字 🏳️‍🌈 ﷽ ok"
_REPLACED = "\ufffd"  # stands for bytes that are no character, of which a text may have others
_STORY = "Tell a story about a lighthouse."


async def _words_of(subject: Subject, tokens: int) -> int:
    """Return how many words make a prompt of so many tokens, by what the server counts."""
    words = tokens
    for _ in range(6):
        answer = await subject.target.ask_one(_of_words(words, 1))
        counted = answer.usage.get("prompt_tokens")
        if counted is None:
            raise Refused("it does not count prompt_tokens")
        if counted == tokens:
            return words
        words += tokens - int(counted)
    raise Refused("no prompt of a given length was found")


def _of_words(words: int, max_tokens: int) -> Body:
    return {"prompt": " and" * words, "max_tokens": max_tokens, "ignore_eos": True}


def _shortened(body: Body, words: int) -> Body:
    return body | {"prompt": f"' and' * {words}"}


@case(
    "context-edge",
    "V#44185 V#49027 V#36917",
    "a full context ends with length",
    seconds=20,
    needs="a context length that is told, ignore_eos, usage",
)
async def context_edge(subject: Subject) -> Finding:
    """Run six answers at once into the end of the context, each a token later than another."""
    limit = subject.max_len
    if limit is None or limit > _LONGEST:
        return inapplicable(f"a context of {limit} tokens, of at most {_LONGEST} that are filled")
    words = await _words_of(subject, limit - 8)
    bodies = [_of_words(words - fewer, 8 + fewer) for fewer in range(6)]
    for fewer, answer in enumerate(await subject.target.together(bodies)):
        body, room = bodies[fewer], 8 + fewer
        if answer.usage.get("prompt_tokens") != limit - room:
            return unclear("a word less is not a token less")
        if (answer.finish, answer.num_tokens) != ("length", room):
            told = f"{answer.num_tokens} tokens ({answer.finish}), room for {room}"
            return failed(told, _shortened(body, words - fewer))
    return passed("six answers filled the context to its last token")


@case(
    "over-the-context",
    "V#36917",
    "status 400",
    seconds=5,
    needs="a context length that is told",
)
async def over_the_context(subject: Subject) -> Finding:
    """Send a prompt that is longer than the context."""
    if subject.max_len is None or subject.max_len > 1 << 20:
        return inapplicable("the server does not tell its context length")
    words = subject.max_len + 64
    body = _of_words(words, 4)
    status = await subject.target.status_of(TEXT, body)
    if status == 200:
        return unclear("it was answered: prompts are cut, or tokens are longer than a word")
    if not 400 <= status < 500:
        return failed(f"status {status}", _shortened(body, words))
    return passed(f"status {status}")


@case("error-inside-200", "V#38202 V#31982", "status 400 before the stream", seconds=2)
async def error_inside_200(subject: Subject) -> Finding:
    """Ask for streams with parameters that are wrong."""
    wrong: list[Body] = [
        {"temperature": -1},
        {"top_p": 7},
        {"logit_bias": {"no token": 1}},
        {"n": 0},
        {"max_tokens": -5},
    ]
    refused = 0
    for fields in wrong:
        body = {"prompt": "x", "max_tokens": 4} | fields
        status = await subject.target.status_of(TEXT, streamed(body))
        if status >= 500:
            return failed(f"status {status}", body)
        if status != 200:
            refused += 1
            continue
        try:
            await subject.target.events(TEXT, body)
        except (Refused, Broken) as error:
            return failed(f"an error inside a stream of status 200: {error}", body)
    if not refused:
        return unclear("it takes all that is wrong")
    return passed(f"{refused} of {len(wrong)} wrong parameters refused before the stream")


@case(
    "stop-over-borders",
    "V#49391 V#47616 S#31599 S#23802",
    "the text ends before the first stop string",
    seconds=10,
    needs="chats, stop",
)
async def stop_over_borders(subject: Subject) -> Finding:
    """Stop at strings that begin and end inside tokens, the later one named first, and once more
    with max_tokens just behind, streamed and not."""
    body: Body = {"messages": [{"role": "user", "content": _STORY}], "max_tokens": 48}
    text = (await subject.target.ask_one(body)).text
    if len(text) < 40 or not subject.repeats:
        return unclear("no text of 40 characters that comes again")
    stops = [text[begin : begin + 5] for begin in range(8, 32, 3)]
    stops = [stop for stop in stops if _REPLACED not in stop]
    if not stops:
        return unclear("the text has no five characters in a row that are whole")
    for stop, later in zip(stops, [*stops[1:], text[32:37]], strict=True):
        stopped: Body = body | {"stop": [later, stop]}
        ends = {text.index(one) + len(one): text.index(one) for one in stopped["stop"]}
        expected = text[: ends[min(ends)]], "stop"
        whole = await subject.target.ask_one(stopped)
        tried = [(stopped, whole), (stopped, await subject.target.stream_one(stopped))]
        just = body | {"max_tokens": (whole.num_tokens or 47) + 1}
        if len((await subject.target.ask_one(just)).text) > min(ends):
            tight = stopped | just
            tried.append((tight, await subject.target.ask_one(tight)))
        for asked, answer in tried:
            if (answer.text, answer.finish) != expected:
                return failed(f"{answer.text[-30:]!r} ({answer.finish}) at {stop!r}", asked)
    return passed(f"{len(stops)} stop strings, streamed and not")


@case("usage", "S#9187", "as many tokens as it counts", seconds=5, needs="token ids")
async def usage(subject: Subject) -> Finding:
    """Count the tokens of answers against their usage, streamed and not."""
    body: Body = {"prompt": _STORY, "max_tokens": 40, "logprobs": 1, "return_token_ids": True}
    for answer in (await subject.target.ask_one(body), await subject.target.stream_one(body)):
        counted = len(answer.ids) or len(answer.logprobs)
        if answer.num_tokens is None or not counted:
            return inapplicable("neither ids nor log-probabilities, or no usage")
        if answer.num_tokens != counted:
            return failed(f"{answer.num_tokens} tokens by usage, {counted} came", body)
    return passed("usage tells the tokens that came")


@case("n-choices", "V#45100 V#41190", "each choice ends once", seconds=10, needs="n, seeds")
async def n_choices(subject: Subject) -> Finding:
    """Stream eight samples of one prompt."""
    body: Body = {"prompt": _STORY, "max_tokens": 32, "n": 8, "temperature": 1.0, "seed": 5}
    events = await subject.target.events(TEXT, body)
    ends = sorted(
        choice.get("index", 0)
        for event in events
        for choice in event.get("choices", ())
        if choice.get("finish_reason")
    )
    if ends != list(range(8)):
        return failed(f"choices {ends} ended", body)
    whole, again = [await subject.target.ask(body) for _ in range(2)]
    if [answer.key for answer in whole] != [answer.key for answer in again]:
        return unclear("eight choices; the server does not repeat samples of a seed")
    for index, answer in enumerate(whole):
        streamed = joined(events, index)
        if (streamed.text, streamed.finish) != (answer.text, answer.finish):
            told = f"choice {index}: {streamed.text[-30:]!r} streamed, {answer.text[-30:]!r} not"
            return failed(told, body)
    return passed("eight choices, streamed and not")


@case(
    "split-characters",
    "exo#1691 vllm-mlx#109 mlx-vlm#1076",
    "every character comes whole",
    seconds=3,
    needs="chats, a forced text",
)
async def split_characters(subject: Subject) -> Finding:
    """Force a text of characters that are several tokens each, streamed and not."""
    body = await forced(subject, _ODD)
    answers: list[Answer] = [
        await subject.target.ask_one(body),
        await subject.target.stream_one(body),
    ]
    for answer in answers:
        if answer.text != _ODD:
            return failed(f"{answer.text!r} for {_ODD!r}", body)
    return passed("the same text, streamed and not")


CASES = (
    context_edge,
    over_the_context,
    error_inside_200,
    stop_over_borders,
    usage,
    n_choices,
    split_characters,
)
