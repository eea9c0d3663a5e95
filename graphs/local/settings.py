"""The settings of a local graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from worker_connector.reference_engine.models.presets import ModelSource
from worker_connector.reference_engine.timing.profile import load_profile

ROUTER_MODES = ("kv", "round-robin")
MODELS = {"tiny": "tiny", "smollm2": "SmolLM2-135M-Instruct", "timed": "timed"}
"""Name on the command line -> the engine's name of the model."""
GIVES_WAY = 15
"""Niceness of engines in the command line's graphs and in benchmarks. A GPU does not compute on the processors of
router, broker and frontend, so the CPU engines give way to these. Tests leave it at 0: beside other work an engine that
gives way to everybody would hardly run."""
LOW_GATE = {"placement": {"min_tokens": 32, "margin_tokens": 16}}
"""Overrides for short prompts: lower than the default, so that donors that are only similar are placed on too."""


@dataclass(frozen=True)
class GraphSettings:
    """What a local graph is made of. ValueError at construction names the field, the value and what is allowed."""

    model: str = "smollm2"
    profile: str | None = None
    """Of the model `timed`, and only of it: the GPU whose time passes and copies take, a name or a YAML file."""
    slower: float = 1.0
    """With a profile: multiplies every time, so that a small machine keeps up with many ranks."""
    workers: int = 2
    data_parallel_size: int = 2
    decode_workers: int = 0
    """Above 0 the graph is disaggregated: the `workers` compute prompts only, and so many others, without a connector,
    decode."""
    routers: int = 1
    mode: str = "enforce"
    connector: bool = True
    blocks_per_rank: int | None = 72
    """Device pages of 32 tokens a rank; small, so that the demo's working set does not fit. None: as many as the
    profile holds."""
    max_num_tokens: int | None = 512
    """Token budget of an iteration; None: the profile's."""
    threads: int = 2
    """torch threads of each worker. The demo sends one request at a time, so one worker at a time is busy."""
    engine_niceness: int = 0
    """Added to the niceness of the workers, 0 to 19. See `GIVES_WAY`."""
    migration_limit: int = 3
    direct: bool = False
    """The frontend is in direct mode, as behind a gateway: workers offer the model, routers give advice only
    (`advise`)."""
    router_mode: str | None = None
    """`kv` or `round-robin`: Dynamo's frontend routes to the workers itself and there is no router of ours, as in a
    graph of somebody who has not installed us. None: our router routes."""
    otlp_endpoint: str | None = None
    """Where routers and connectors send spans. With it Dynamo hands its trace context on, and logs are JSON lines."""
    observability: bool = False
    """Run Prometheus and, where it is installed, Grafana beside the graph."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Further values of the configuration file, by section: `{"evidence": {"deadline_ms": 10}}`."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model is {self.model!r}; it must be one of {', '.join(MODELS)}")
        for name in ("workers", "data_parallel_size", "routers", "blocks_per_rank", "max_num_tokens", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self.model_source()
        if self.decode_workers < 0:
            raise ValueError(f"decode_workers is {self.decode_workers}; it must be at least 0")
        if not 0 <= self.engine_niceness <= 19:
            raise ValueError(f"engine_niceness is {self.engine_niceness}; it must be 0 to 19")
        if self.router_mode is not None and self.router_mode not in ROUTER_MODES:
            raise ValueError(
                f"router_mode is {self.router_mode!r}; it must be one of {', '.join(ROUTER_MODES)}, or None"
            )
        if self.router_mode is not None and self.direct:
            raise ValueError("direct is True; with router_mode there is no router of ours to give advice")
        if self.router_mode is not None and self.decode_workers:
            raise ValueError(f"decode_workers is {self.decode_workers}; with router_mode it must be 0")

    @property
    def offers_model(self) -> bool:
        """True if workers offer the model to clients, since no router of ours offers it."""
        return self.direct or self.router_mode is not None

    @property
    def frontend_mode(self) -> str:
        """Dynamo's own `--router-mode`. In a disaggregated graph it says how decode workers are chosen; the card of the
        routers asks for round-robin by itself."""
        if self.direct:
            return "direct"
        return self.router_mode or ("kv" if self.decode_workers else "round-robin")

    def model_source(self) -> ModelSource:
        """The engine's name of the model, with the shape of its pages. ValueError for a profile that is not known, or
        that the model does not take."""
        if (self.model == "timed") != (self.profile is not None):
            raise ValueError(f"profile is {self.profile!r}; model `timed` needs one, and {self.model!r} is the model")
        config = load_profile(self.profile).page_config if self.profile is not None else None
        return ModelSource(self.served_model, config=config)

    @property
    def served_model(self) -> str:
        """The name that clients ask for."""
        return MODELS[self.model]

    def config(self, bus_url: str) -> dict[str, Any]:
        """The configuration file that routers and connectors of this graph share."""
        base: dict[str, dict[str, Any]] = {
            "model": {"name": self.served_model},
            "bus": {"url": bus_url},
            # The engine shares the cores with the router here, so the router may have to wait for its turn.
            "evidence": {"deadline_ms": 25.0, "exact_deadline_ms": 25.0},
            "placement": {"mode": self.mode},
            "connector": {"materialization": "exact", "slab_bytes": 256 * 1024 * 1024},
        }
        dynamo: dict[str, Any] = {}
        if self.routers == 1:
            dynamo["kv_router"] = {"router_replica_sync": False}  # three messages a request that nobody would receive
        if self.decode_workers:
            dynamo["worker_component"] = "prefill"
        if self.direct:
            dynamo["offer_model"] = False
        base["dynamo"] = dynamo
        if self.otlp_endpoint is not None:
            base["observe"] = {"otlp_endpoint": self.otlp_endpoint}
        for section, values in self.overrides.items():
            base[section] = {**base.get(section, {}), **values}
        return base
