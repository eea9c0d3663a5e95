"""Whatever reads bytes or plain values from outside has a property test: none is forgotten, and none unpickles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READS = {
    "json.loads", "json.load", "msgspec.json.decode", "msgspec.msgpack.decode", "msgspec.msgpack.Decoder",
    "msgspec.json.Decoder",
    "msgspec.convert", "yaml.load", "np.frombuffer", "datetime.datetime.fromisoformat", "urlsplit",
}  # fmt: skip
ENDINGS = (".unpack", ".unpack_from", ".iter_unpack")
NEVER = ("pickle", "cloudpickle", "marshal", "shelve", "dill")

ROUTER, BUS, CONNECTOR = (f"tests/fuzz/test_{name}_inputs.py" for name in ("router", "bus", "connector"))
TESTED = {
    "dynamo_semkv/bus/acks.py": (BUS, "test_any_acknowledgement"),
    "dynamo_semkv/bus/inspection.py": (ROUTER, "test_any_answer_of_the_broker"),
    "dynamo_semkv/bus/server_check.py": (ROUTER, "test_any_answer_of_the_broker"),
    "dynamo_semkv/cli/page.py": (ROUTER, "test_any_bytes_of_a_page"),
    "dynamo_semkv/config/forms.py": ("tests/fuzz/test_configuration.py", "test_any_text_of_a_form"),
    "dynamo_semkv/config/load.py": ("tests/fuzz/test_configuration.py", "test_any_tree"),
    "dynamo_semkv/config/yaml_text.py": ("tests/fuzz/test_configuration.py", "test_any_yaml"),
    "dynamo_semkv/contracts/codec.py": ("tests/contracts/test_hostile_bytes.py", "test_any_bytes"),
    "dynamo_semkv/contracts/keys.py": (ROUTER, "test_any_request_is_read_or_refused"),
    "dynamo_semkv/contracts/sketch.py": ("tests/contracts/test_hostile_bytes.py", "test_sketches_with_damage"),
    "dynamo_semkv/router/facts.py": (ROUTER, "test_any_request_is_read_or_refused"),
    "dynamo_semkv/router/runtime_cards.py": (ROUTER, "test_any_card_is_a_replica_or_named"),
    "dynamo_semkv/telemetry/target.py": (ROUTER, "test_any_environment_of_spans"),
    "worker_connector/disk/block_file.py": (CONNECTOR, "test_any_block_file_is_the_block_or_a_miss"),
    "worker_connector/requests/engine_namespace.py": (CONNECTOR, "test_any_configuration_of_a_model"),
    "worker_connector/donors/event_batches.py": (
        "tests/worker_connector/donors/test_event_batches.py",
        "test_any_bytes_of_batches",
    ),
    "worker_connector/donors/kv_event_socket.py": (CONNECTOR, "test_any_bytes_of_an_event_pipe"),
    "worker_connector/fetch/wire.py": (CONNECTOR, "test_any_bytes_between_workers"),
    "worker_connector/disk/namespace_codec.py": (CONNECTOR, "test_any_words_of_a_namespace"),
    "worker_connector/link/frames.py": (CONNECTOR, "test_any_bytes_between_ranks"),
    "worker_connector/link/wire.py": (CONNECTOR, "test_any_bytes_between_ranks"),
    "worker_connector/engine_api/request_view.py": (CONNECTOR, "test_tokens_there_and_back"),
}
OURS = {
    "dynamo_semkv/bus/server.py": "a file that our own nats-server has written",
    "dynamo_semkv/evidence/deadline.py": "text that it has just written itself, to copy what a provider of this "
    "process shows",
    "dynamo_semkv/evidence/postings.py": "memory of this process",
    "worker_connector/ledger/block.py": "memory of this process",
    "worker_connector/link/local_server.py": "what the kernel says of a connection",
}
"""What reads nothing from outside, and why."""
LEFT_OUT = ("bench", "reference_engine", "testing")
"""Not on the way of a request of a deployment."""
MORE = (
    (BUS, "test_any_messages_into_the_intake"),
    (BUS, "test_any_pack_into_a_subscription_and_the_intake"),
    (BUS, "test_any_sound_donor_events_in_any_order_into_catalog_and_index"),
    (BUS, "test_any_hint_over_the_bus"),
    (BUS, "test_any_hint_on_a_request"),
    (ROUTER, "test_any_exposition"),
    (ROUTER, "test_any_traceparent"),
    (ROUTER, "test_any_body_of_advise_has_an_answer"),
    (ROUTER, "test_any_page_is_shown_or_refused_in_one_sentence"),
    (CONNECTOR, "test_any_cache_events"),
    (CONNECTOR, "test_any_epoch"),
    (CONNECTOR, "test_any_address_of_a_hint"),
    ("tests/fuzz/test_configuration.py", "test_any_environment"),
    ("tests/fuzz/test_page_inputs.py", "test_any_bytes_to_the_page"),
)
"""Parsers that none of these calls gives away."""


def sources() -> Iterator[Path]:
    for package in ("dynamo_semkv", "worker_connector"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not set(path.relative_to(ROOT).parts) & set(LEFT_OUT):
                yield path


def reads(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            called = ast.unparse(node.func)
            if called in READS or called.endswith(ENDINGS):
                return True
    return False


def test_every_file_that_reads_from_outside_is_listed() -> None:
    found = {str(path.relative_to(ROOT)) for path in sources() if reads(path.read_text())}
    assert found == {*TESTED, *OURS}


@pytest.mark.parametrize(("file", "name"), sorted({*TESTED.values(), *MORE}))
def test_its_test_exists_and_draws_what_it_sends(file: str, name: str) -> None:
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            assert any("given(" in decorator or "seed" in decorator for decorator in decorators)
            return
    pytest.fail(f"{file} has no {name}")


def test_nothing_unpickles() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in NEVER], path


@pytest.mark.parametrize("text", ["json.loads(raw)", "x = _HEADER.unpack(raw)", "msgspec.convert(a, B)"])
def test_a_read_is_seen(text: str) -> None:
    assert reads(text)
