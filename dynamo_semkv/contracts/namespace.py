"""CacheNamespace: everything that decides whether KV of one request may serve another (RFC semantic KV cache reuse,
"Namespace and Compatibility").

Rules, the same for every field:
* `None` means *unknown*. One unknown required field disables materialization for the request; discovery may go on.
* `""` or `()` means *known to be absent* (no adapter, no salt, no images). It is another value than unknown.
* The cache salt enters only as a keyed digest (`tenant_scope`); the salt itself never leaves the process.

The engine announces its namespace with no request in it; `for_request` adds what a request brings (tenant, adapter,
images).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dynamo_semkv.contracts.errors import ContractError

NAMESPACE_SCHEMA = "semkv-namespace-1"
DIGEST_BYTES = 32
_MAX_TEXT = 512
_MAX_IMAGES = 256
DEFAULT_SALT_KEY = b"dynamo-semkv/unkeyed"
"""Used where no key is configured: tenants are kept apart, but who can guess a salt can recognise its digest."""


class CacheNamespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One value per field of the RFC's list. Unknown fields are refused: a field that we do not understand may decide
    correctness. Compared by `first_difference`, hashed by `digest`.
    """

    model: str | None = None
    """Model id and revision, as the engine loaded it."""
    engine: str | None = None
    """Engine and version, e.g. `tensorrt_llm/1.2.0`."""
    tokenizer: str | None = None
    prompt_format: str | None = None
    """Chat template or prompt format identity."""
    backend_mode: str | None = None
    """TensorRT-LLM backend mode: `pytorch`, `reference`, ..."""
    tokens_per_block: int | None = None
    kv_dtype: str | None = None
    kv_layout: str | None = None
    """Fingerprint of regions, groups and packing of the registered pool."""
    attention_window: str | None = None
    """`full`, or the window sizes of the layer groups in order."""
    attention_shape: str | None = None
    """MHA, MQA, GQA, VGQA or VSWA with head counts and head size."""
    parallelism: str | None = None
    """Tensor-parallel size and shard rule: bytes of one shard mean nothing to another."""
    lora: str | None = None
    lora_revision: str | None = None
    """`""` with `lora == ""`; for an adapter without a known revision it is unknown, so nothing is materialized."""
    ptuning: str | None = None
    speculative: str | None = None
    multimodal_policy: str | None = None
    multimodal: tuple[str, ...] | None = None
    """Content hashes of the request's images and other media, in order; `None` when there is media without a hash."""
    tenant: str | None = None
    """`tenant_scope` of the request's cache salt."""
    connector: str | None = None
    """Connector and the version of its key scheme."""
    provider_generation: str | None = None
    """Generation of the content itself: raised when weights are reloaded in place. The life of one engine's cache is
    fenced by the donor's own `Generation` instead, so that verified bytes on disk outlive a restart."""

    def __post_init__(self) -> None:
        for name, value in self._items():
            if isinstance(value, str) and len(value) > _MAX_TEXT:
                raise ContractError(f"namespace.{name}", value, f"at most {_MAX_TEXT} characters")
        if self.tokens_per_block is not None and not 1 <= self.tokens_per_block <= 65_536:
            raise ContractError("namespace.tokens_per_block", self.tokens_per_block, "1 to 65536")
        if self.multimodal is not None and len(self.multimodal) > _MAX_IMAGES:
            raise ContractError("namespace.multimodal", len(self.multimodal), f"at most {_MAX_IMAGES} hashes")

    def _items(self) -> Iterator[tuple[str, str | int | tuple[str, ...] | None]]:
        for name in self.__struct_fields__:
            yield name, getattr(self, name)

    def unknown_fields(self) -> tuple[str, ...]:
        """Names of the fields that are not known; not empty means: do not materialize."""
        return tuple(name for name, value in self._items() if value is None)

    def for_request(
        self,
        *,
        tenant: str | None,
        lora: str | None = "",
        lora_revision: str | None = "",
        multimodal: Sequence[str] | None = (),
    ) -> CacheNamespace:
        """The engine's namespace narrowed to one request. Defaults say: no adapter, no media."""
        return msgspec.structs.replace(
            self,
            tenant=tenant,
            lora=lora,
            lora_revision=lora_revision,
            multimodal=None if multimodal is None else tuple(multimodal),
        )

    def digest(self) -> bytes:
        """32 bytes, equal across processes, Python versions and hash seeds. Every field is framed with its name, type
        and length, so no two different namespaces encode to the same bytes."""
        h = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"semkv-namespace")
        _frame(h, b"v", NAMESPACE_SCHEMA.encode())
        for name, value in self._items():
            key = name.encode()
            if value is None:
                _frame(h, b"?", key)
            elif isinstance(value, str):
                _frame(h, b"s", key, _bytes(value))
            elif isinstance(value, int):
                _frame(h, b"i", key, str(value).encode())
            else:
                _frame(h, b"l", key, *(_bytes(part) for part in value))
        return h.digest()


def _bytes(text: str) -> bytes:
    """UTF-8; a lone surrogate, which Python strings may hold, is kept apart instead of failing the request it came
    with."""
    return text.encode("utf-8", "surrogatepass")


def _frame(h: hashlib.blake2b, tag: bytes, *parts: bytes) -> None:
    h.update(tag)
    h.update(len(parts).to_bytes(4, "little"))
    for part in parts:
        h.update(len(part).to_bytes(4, "little"))
        h.update(part)


def first_difference(left: CacheNamespace, right: CacheNamespace) -> str | None:
    """Name of the first field, in declaration order, that differs or is unknown on either side; `None` when KV may be
    shared.

    Unknown equals nothing, not even unknown.
    """
    for name in CacheNamespace.__struct_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if a is None or b is None or a != b:
            return str(name)
    return None


def differing_field(left: CacheNamespace, right: CacheNamespace) -> str | None:
    """First field in which two announced namespaces are not the same value. Unlike `first_difference`, unknown equals
    unknown: tenant, adapter and media are unknown in every announcement, and an unknown field already keeps the engine
    from materializing."""
    names: dict[str, object] = {name: getattr(left, name) for name in left.__struct_fields__}
    return next((name for name, value in names.items() if value != getattr(right, name)), None)


def agreed_namespace(
    announced: Iterable[tuple[str, CacheNamespace]], before: CacheNamespace | None = None
) -> CacheNamespace | None:
    """What most workers announce. `announced`: (stable id, namespace) of every rank; a worker has one vote however many
    ranks it has, for what most of them announce. Where as many say one thing as another, `before`, what held until now,
    holds if it is among them; else None.
    """
    ranks: dict[str, Counter[CacheNamespace]] = {}
    for stable_routing_id, namespace in announced:
        ranks.setdefault(stable_routing_id, Counter())[namespace] += 1
    votes = Counter(said.most_common(1)[0][0] for said in ranks.values())
    most = max(votes.values(), default=0)
    leading = [namespace for namespace, count in votes.items() if count == most]
    if len(leading) == 1:
        return leading[0]
    return before if before in leading else None


def tenant_scope(salt: str | None, key: bytes = DEFAULT_SALT_KEY) -> str:
    """Keyed digest of a cache salt; `""` for a request without one.

    An empty salt is refused (`ContractError`): some components read it as "no salt" and others as a salt, and a request
    must not cross that line by accident.
    """
    if salt is None:
        return ""
    if salt == "":
        raise ContractError("cache_salt", salt, "a non-empty string, or no salt at all", secret=True)
    if not 1 <= len(key) <= 64:
        raise ContractError("salt_key", len(key), "1 to 64 bytes", secret=True)
    return hashlib.blake2b(_bytes(salt), digest_size=16, key=key, person=b"semkv-tenant").hexdigest()


def semblend_tenant_key(salt: str | None) -> str:
    """SemBlend's public tenant key of a salt (0.3.25): only used to recognise SemBlend's donors, never emitted by us,
    since it is not keyed. SemBlend strips blanks around a salt, so two salts that differ in blanks are one tenant to
    it: such salts are refused here rather than merged."""
    if salt is None:
        return "semblend:tenant:v1:none"
    if salt == "" or salt != salt.strip():
        raise ContractError(
            "cache_salt", salt, "no leading or trailing blanks where SemBlend donors are read", secret=True
        )
    return "semblend:tenant:v1:" + hashlib.sha256(_bytes(salt)).hexdigest()[:32]
