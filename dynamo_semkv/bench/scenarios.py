"""The scenarios of the RFC ("Tests", benchmark scenarios) as chat requests, small enough for a CPU.

A scenario says what is asked, never what the result must be: the table shows the result.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dynamo_semkv.bench.texts import Document, documents

Message = dict[str, str]

QUESTIONS = (
    "Name the main subject in one word.",
    "Which term is defined first?",
    "State one rule that the text gives.",
    "What may raise an error here?",
    "Which word occurs most often?",
    "Give a title for this text.",
)


@dataclass(frozen=True)
class ChatRequest:
    """One request of the OpenAI chat endpoint. `cache_salt` names the tenant; `None` is the public one."""

    messages: tuple[Message, ...]
    cache_salt: str | None = None
    max_tokens: int = 4


@dataclass(frozen=True)
class Scenario:
    """A list of requests that are sent one after the other; `title` is shown meanwhile."""

    name: str
    title: str
    requests: tuple[ChatRequest, ...] = field(repr=False)


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _ask(document: Document, question: str, salt: str | None = None) -> ChatRequest:
    """The document first, the question after it, so equal documents give equal prefixes."""
    return ChatRequest((_system(document.text), _user(question)), salt)


def repeated_system_prompt(document: Document, requests: int) -> Scenario:
    """One document as the system prompt of all requests, with changing questions."""
    asks = tuple(_ask(document, QUESTIONS[i % len(QUESTIONS)]) for i in range(requests))
    return Scenario("system_prompt", "repeated system prompt", asks)


def same_document_other_instruction(sources: Sequence[Document]) -> Scenario:
    """Each document behind two instructions. The instruction comes first, so no prefix is shared beyond the chat
    wrapper: related, not identical."""
    asks = []
    for document in sources:
        asks.append(ChatRequest((_system("You answer in one word."), _user(f"Read this.\n\n{document.text}"))))
        asks.append(
            ChatRequest(
                (_system("You are a careful editor who lists open points."), _user(f"Text:\n\n{document.text}"))
            )
        )
    return Scenario("other_instruction", "same document, other instruction", tuple(asks))


def reordered_chunks(chunks: Sequence[Document], orders: int, seed: int) -> Scenario:
    """Retrieved chunks in another order each time, behind one instruction. Only the first order can be an exact prefix
    of itself."""
    rng = random.Random(seed)
    texts = [chunk.text[:1200] for chunk in chunks]
    asks = []
    for _ in range(orders):
        context = "\n\n".join(f"[source]\n{text}" for text in texts)
        asks.append(ChatRequest((_system("Answer from the sources."), _user(f"{context}\n\n{QUESTIONS[0]}"))))
        while True:
            shuffled = texts[:]
            rng.shuffle(shuffled)
            if shuffled[0] != texts[0]:
                break
        texts = shuffled
    return Scenario("reordered_chunks", "reordered RAG chunks", tuple(asks))


TOOLS = """You can call these tools, one JSON object a line.
{"name": "search_documents", "parameters": {"query": "string", "limit": "integer, 1 to 20", "language": "string"}}
{"name": "read_file", "parameters": {"path": "string", "first_line": "integer", "last_line": "integer"}}
{"name": "write_file", "parameters": {"path": "string", "content": "string", "overwrite": "boolean"}}
{"name": "run_tests", "parameters": {"selection": "string", "timeout_seconds": "integer"}}
{"name": "open_ticket", "parameters": {"title": "string", "severity": "low, medium or high", "body": "string"}}
Never call a tool twice with the same arguments. Say what you found before you call the next one."""


def agent_turns(documents_read: Sequence[Document], turns: int) -> Scenario:
    """One conversation that grows: every turn repeats the tool schema and all earlier turns."""
    messages: list[Message] = [_system(TOOLS)]
    asks = []
    for turn in range(turns):
        body = documents_read[turn % len(documents_read)].text[:900]
        messages.append(_user(f"Step {turn + 1}. The file says:\n{body}\nWhat next?"))
        asks.append(ChatRequest(tuple(messages)))
        messages.append(_assistant(f"I read it. Next I call search_documents for step {turn + 1}."))
    return Scenario("agent", "multi-turn agent, tool schema", tuple(asks))


def large_working_set(sources: Sequence[Document], passes: int) -> Scenario:
    """More documents than the device pools hold: from the second pass on their KV is in host memory, if anywhere."""
    asks = tuple(_ask(document, QUESTIONS[p % len(QUESTIONS)]) for p in range(passes) for document in sources)
    return Scenario("working_set", "working set larger than the device pool", asks)


def tenant_working_set(sources: Sequence[Document], passes: int) -> Scenario:
    """The same of one tenant. Its salted blocks in host memory are not in Dynamo's index, so only a donor's place says
    where they are."""
    asks = tuple(replace(request, cache_salt="tenant-w") for request in large_working_set(sources, passes).requests)
    return Scenario("tenant_set", "working set of one tenant, with a salt", asks)


def two_tenants(sources: Sequence[Document]) -> Scenario:
    """Both tenants send the same documents once: whatever is reused here crossed a tenant."""
    asks = tuple(_ask(document, QUESTIONS[0], salt) for salt in ("tenant-a", "tenant-b") for document in sources)
    return Scenario("tenants", "same documents, two tenants", asks)


def negative_controls(sources: Sequence[Document]) -> Scenario:
    """Documents that nobody sent before, each once; disjoint from all others by word 8-grams."""
    asks = tuple(
        ChatRequest((_system(f"Section {i + 1}."), _user(f"{document.text}\n\n{QUESTIONS[-1]}")))
        for i, document in enumerate(sources)
    )
    return Scenario("negative", "negative controls", asks)


def demo(seed: int = 7) -> list[Scenario]:
    """The workload of `make demo`: 64 requests of some 900 tokens."""
    docs = documents(35, 3_400)
    return [
        repeated_system_prompt(docs[0], 5),
        same_document_other_instruction(docs[1:3]),
        reordered_chunks(docs[3:6], 3, seed),
        agent_turns(docs[6:9], 4),
        large_working_set(docs[9:19], 2),
        tenant_working_set(docs[25:35], 2),
        two_tenants(docs[19:21]),
        negative_controls(docs[21:25]),
    ]
