"""The door to TensorRT-LLM: which classes are handed out, and that the local ones have the original's rules."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from worker_connector.engine_api import engine
from worker_connector.engine_api.engine import (
    ABC_PATHS,
    BAD_PAGE_INDEX,
    LOCAL_API,
    KvCacheBufferRef,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
    RequestData,
    SchedulerOutput,
    resolve_engine_api,
    valid_page_slots,
)

ABC_NAMES = ("KvCacheConnectorScheduler", "KvCacheConnectorWorker", "RequestData", "SchedulerOutput")


def importer(modules: dict[str, Any], broken: dict[str, ImportError] | None = None) -> Any:
    """import_module over a fixed set of modules; parents of a known module exist."""

    def import_module(path: str) -> ModuleType:
        if broken and path in broken:
            raise broken[path]
        if path in modules:
            return modules[path]  # type: ignore[no-any-return]
        missing = next(
            ".".join(path.split(".")[:n])
            for n in range(1, path.count(".") + 2)
            if not any((known + ".").startswith(".".join(path.split(".")[:n]) + ".") for known in modules)
        )
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    return import_module


def fake_abc() -> SimpleNamespace:
    return SimpleNamespace(**{name: type(name, (), {}) for name in ABC_NAMES})


def test_without_tensorrt_llm_the_local_classes_are_used() -> None:
    api = resolve_engine_api(importer({}))
    assert api.source == LOCAL_API
    assert set(api.names) == {*ABC_NAMES, *engine._LAYOUT_NAMES}


@pytest.mark.parametrize("position", range(len(ABC_PATHS)))
def test_the_real_classes_are_found_under_both_paths(position: int) -> None:
    abc_path, layout_path = ABC_PATHS[position]
    abc, layout = fake_abc(), SimpleNamespace(KvCacheLayout="theirs", KvCacheRegion="theirs")
    api = resolve_engine_api(importer({"tensorrt_llm": SimpleNamespace(), abc_path: abc, layout_path: layout}))
    assert api.source == abc_path
    assert all(api.names[name] is getattr(abc, name) for name in ABC_NAMES)
    assert api.names["KvCacheLayout"] == "theirs"
    assert callable(api.names["valid_page_slots"])  # absent there: ours stands in


def test_a_version_without_layout_types_gets_ours() -> None:
    abc_path = ABC_PATHS[1][0]
    api = resolve_engine_api(importer({"tensorrt_llm": SimpleNamespace(), abc_path: fake_abc()}))
    assert api.names["KvCacheRegion"].__module__ == "worker_connector.engine_api.cache_layout"


def test_an_installed_tensorrt_llm_without_the_abc_is_an_error() -> None:
    with pytest.raises(ImportError, match=r"tensorrt_llm 0\.1 is installed"):
        resolve_engine_api(importer({"tensorrt_llm": SimpleNamespace(__version__="0.1")}))


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("tensorrt_llm", ImportError("libcuda.so.1: cannot open shared object file")),
        ("tensorrt_llm", ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")),
        (ABC_PATHS[0][0], ModuleNotFoundError("No module named 'xgrammar'", name="xgrammar")),
    ],
)
def test_a_broken_installation_is_not_mistaken_for_none(where: str, error: ImportError) -> None:
    modules = {"tensorrt_llm": SimpleNamespace(), ABC_PATHS[0][0]: fake_abc()}
    with pytest.raises(type(error)) as raised:
        resolve_engine_api(importer(modules, {where: error}))
    assert raised.value is error


def test_engine_api_says_what_is_in_use() -> None:
    assert engine.ENGINE_API in (LOCAL_API, *(path for path, _ in ABC_PATHS))


class _Rest(KvCacheConnectorScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False


class FlatScheduler(_Rest):
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        self.finished = cache_block_ids
        return True

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.allocated = block_ids


class GroupedScheduler(_Rest):
    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        return False

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        pass


def test_empty_group_list_reaches_the_flat_form() -> None:
    scheduler = FlatScheduler(None)
    assert scheduler.request_finished_by_layer_group(None, [[]])
    scheduler.update_state_after_alloc_by_layer_group(None, [[1, 2]])
    assert (scheduler.finished, scheduler.allocated) == ([], [1, 2])


@pytest.mark.parametrize("groups", [[], [[1], [2]]])
def test_flat_form_refuses_any_other_number_of_groups(groups: list[list[int]]) -> None:
    with pytest.raises(NotImplementedError, match=f"{len(groups)} layer groups"):
        FlatScheduler(None).request_finished_by_layer_group(None, groups)
    with pytest.raises(NotImplementedError, match=f"{len(groups)} layer groups"):
        FlatScheduler(None).update_state_after_alloc_by_layer_group(None, groups)


def test_per_group_form_needs_no_flat_stub() -> None:
    scheduler = GroupedScheduler(None)
    assert scheduler.request_finished_by_layer_group(None, [[1], [2]]) is False
    with pytest.raises(NotImplementedError, match="GroupedScheduler implements request_finished_by_layer_group"):
        scheduler.request_finished(None, [])


def test_neither_form_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="request_finished"):
        _Rest(None)


class FlatWorker(KvCacheConnectorWorker):
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self.pool = kv_cache_tensor

    def start_load_kv(self, stream: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        pass

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        pass

    def wait_for_save(self, stream: Any) -> None:
        pass

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return [], []


def test_metadata_stays_bound_until_the_next_bind() -> None:
    worker = FlatWorker("args")
    assert worker.get_connector_meta() is None
    worker.bind_connector_meta("one")
    worker.start_load_kv(None)
    assert worker.get_connector_meta() == "one"
    worker._clear_connector_meta()
    assert worker.get_connector_meta() is None
    assert worker.register_forward_pass_callable() is None
    assert (worker.supports_attention_dp, FlatScheduler(None).supports_attention_dp) == (False, False)


def layout_over(pool: torch.Tensor, stride_extra: int = 0, groups: int = 1) -> KvCacheLayout:
    """`pool` is [slots, layers, 2, block]; with `stride_extra` bytes of each slot's end left out of the region."""
    slots, layers = pool.shape[:2]
    stride = pool.stride(0) * pool.element_size()
    buffers = tuple(KvCacheBufferRef(layer, role) for layer in range(layers) for role in ("key", "value"))
    region = KvCacheRegion(pool.data_ptr(), stride - stride_extra, stride, slots, buffers)
    group = KvCacheLayerGroupLayout(0, tuple(range(layers)), None, (region,))
    return KvCacheLayout(4, (group,) * groups, pool.dtype)


def test_single_pool_layout_folds_to_the_tensor() -> None:
    pool = torch.arange(5 * 3 * 2 * 8, dtype=torch.float32).view(5, 3, 2, 8)
    worker = FlatWorker(None)
    worker.register_kv_cache_layout(layout_over(pool))
    assert torch.equal(worker.pool, pool)
    worker.pool[2, 1, 1, 7] = -1
    assert pool[2, 1, 1, 7] == -1


def test_several_groups_do_not_fold() -> None:
    pool = torch.zeros(5, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=r"2 layer group\(s\), 2 region\(s\)"):
        FlatWorker(None).register_kv_cache_layout(layout_over(pool, groups=2))


def test_region_addressing() -> None:
    pool = torch.arange(5 * 1 * 2 * 8, dtype=torch.float32).view(5, 1, 2, 8)
    layout = layout_over(pool, stride_extra=32)
    (region,) = layout.group(0).regions
    assert region.address_of(3) == pool.data_ptr() + 3 * 64
    assert region.slot_tensor(3, torch.float32).tolist() == pool[3].flatten()[:8].tolist()
    assert region.as_tensor().shape == (5, 32)
    for slot in (-1, 5):
        with pytest.raises(IndexError, match=str(slot)):
            region.slot_tensor(slot)
    with pytest.raises(ValueError, match="multiples"):
        KvCacheRegion(pool.data_ptr(), 6, 64, 5, ()).as_tensor(torch.float32)


def test_layout_lookups() -> None:
    layout = layout_over(torch.zeros(5, 3, 2, 8))
    assert layout.group_of_layer(2).layer_group_id == 0
    assert layout.group(0).bytes_per_page == 3 * 2 * 8 * 4
    with pytest.raises(KeyError):
        layout.group(1)
    with pytest.raises(KeyError):
        layout.group_of_layer(3)


def test_valid_page_slots_keep_their_ordinals() -> None:
    assert list(valid_page_slots([BAD_PAGE_INDEX, 4, BAD_PAGE_INDEX, 0])) == [(1, 4), (3, 0)]


def test_request_data_defaults() -> None:
    data = RequestData(1, [2], [3], 0, 1)
    assert (data.block_hashes, data.priorities, data.cache_salt, data.new_block_ids_by_layer_group) == (
        [],
        None,
        None,
        [],
    )
    assert SchedulerOutput() == SchedulerOutput([], [], None)
