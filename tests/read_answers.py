"""Reads a run's answers with OpenAI's client library, as a user of its batches would, and checks
that every record has the shape of a batch output and every body the library's type.

    read_answers.py PROMPTS ANSWERS

PROMPTS may be "-": then the answers alone are checked. Prints what it saw, and each line that is
otherwise, with the place; exits 1 if there is one.
"""

import collections
import json
import sys

import pydantic
from openai.types import Completion
from openai.types.chat import ChatCompletion

TYPES = {"chat.completion": ChatCompletion, "text_completion": Completion}

# What is ours beside the library's fields.
OURS = {
    "ChatCompletionMessage": {"reasoning_content"},
    "CompletionUsage": {"reasoning_tokens"},
}


class Odd(Exception):
    """A record that is not as it should be."""


def expect(holds, what):
    if not holds:
        raise Odd(what)


def check_extras(value, place):
    """The library keeps unknown fields: none but ours may be there."""
    if isinstance(value, pydantic.BaseModel):
        extra = set(value.model_extra or {}) - OURS.get(type(value).__name__, set())
        expect(not extra, f"{place}: {sorted(extra)} are no fields of {type(value).__name__}")
        for name, inner in value:
            check_extras(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check_extras(inner, f"{place}[{i}]")


def check_choice(choice, wanted, chat):
    """Against the body of the request."""
    if not wanted.get("logprobs", False) and wanted.get("logprobs") != 0:
        expect(choice.logprobs is None, "logprobs that nobody asked for")
    elif chat:
        for token in choice.logprobs.content:
            expect(len(token.top_logprobs) == wanted.get("top_logprobs", 0), "top_logprobs: count")
            expect(token.logprob <= 0, "a log probability above 0")
    else:
        logprobs = choice.logprobs
        count = len(logprobs.tokens)
        expect(count == len(logprobs.token_logprobs) == len(logprobs.text_offset), "logprobs: count")
        expect((logprobs.top_logprobs is not None) == (wanted["logprobs"] > 0), "top_logprobs")


def check_answer(response, request, seen):
    body = response["body"]
    kind = TYPES.get(body.get("object"))
    expect(kind is not None, f"object is {body.get('object')!r}")
    answer = kind.model_validate_json(json.dumps(body), strict=True)
    check_extras(answer, "body")
    expect(answer.model_dump(exclude_unset=True) == body, "the library reads something else")
    expect([choice.index for choice in answer.choices] == list(range(len(answer.choices))), "index")
    usage = answer.usage
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage")
    if request is not None:
        wanted = request["body"]
        chat = request["url"] == "/v1/chat/completions"
        expect((kind is ChatCompletion) == chat, f"{request['url']} is answered by {kind.__name__}")
        expect(len(answer.choices) == (wanted.get("n") or 1), "n")
        for choice in answer.choices:
            check_choice(choice, wanted, chat)
    seen[kind.__name__] += 1
    for choice in answer.choices:
        seen[choice.finish_reason] += 1
        seen["logprobs"] += choice.logprobs is not None
        if kind is ChatCompletion:
            for call in choice.message.tool_calls or []:
                expect(call.type == "function", "the type of a tool call")
                expect(isinstance(json.loads(call.function.arguments), dict), "arguments of a call")
                seen["calls"] += 1


def check_refusal(record):
    error = record["response"]["body"]["error"]
    expect(set(error) == {"message", "type", "param", "code"}, "the fields of the error")
    for name in ("message", "type", "code"):
        expect(isinstance(error[name], str) and error[name], f"the error's {name}")
    expect(error["param"] is None or isinstance(error["param"], str), "the error's param")
    expect(record["error"] == {"code": error["code"], "message": error["message"]}, "error")


def check(record, requests, seen):
    for name, kinds in (("id", str), ("custom_id", str), ("response", dict)):
        expect(isinstance(record.get(name), kinds), f"{name} is {record.get(name)!r}")
    response = record["response"]
    expect(set(response) == {"status_code", "request_id", "body"}, "the fields of the response")
    expect(isinstance(response["request_id"], str), "request_id")
    expect("error" in record, "no error, not even null")
    request = None
    if requests is not None:
        expect(record["custom_id"] in requests, f"nobody asked {record['custom_id']!r}")
        request = requests[record["custom_id"]]
    if response["status_code"] == 200:
        expect(record["error"] is None, "an answer with an error")
        check_answer(response, request, seen)
    else:
        expect(400 <= response["status_code"] < 600, f"status {response['status_code']}")
        check_refusal(record)
        seen["refused"] += 1


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main(prompts, answers):
    requests = None
    if prompts != "-":
        requests = {request["custom_id"]: request for request in lines(prompts)}
    seen = collections.Counter()
    faults = []
    records = lines(answers)
    for number, record in enumerate(records, 1):
        try:
            check(record, requests, seen)
        except (Odd, pydantic.ValidationError) as odd:
            faults.append(f"line {number}: {odd}")
    by_id = {record["custom_id"]: record for record in records}
    if len(by_id) != len(records):
        faults.append("a custom_id has two records")
    if requests is not None and by_id.keys() != requests.keys():
        faults.append(f"no record of {sorted(requests.keys() - by_id.keys())}")
    print(" ".join(f"{name}={count}" for name, count in sorted(seen.items())))
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
