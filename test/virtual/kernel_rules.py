"""Which rule of the kernels has which test: docs/kernel-rules.md, made of the rows of RULES in the models' tests and of the list below.

    PYTHONPATH=. python -m test.virtual.kernel_rules > docs/kernel-rules.md
"""
from __future__ import annotations
import ast, functools, pathlib
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
# file -> the answer of a row that names none, the kernels of a row that names none
TABLES = {"test_msm_model.py": ("0", "6.12"), "test_vm_bind.py": ("errno.EINVAL", "7.2"), "test_kgsl_model.py": ("0", "4.9")}
KERNELS = {"ALL": "all", "OLD": "6.1, 6.6", "NEW": "6.12, 7.2", "ALL[:3]": "6.1 to 6.12", "ALL[1:]": "6.6 to 7.2", '("6.1",)': "6.1",
           '("7.2",)': "7.2", '("6.12",)': "6.12", 'ALL if n == 100 else ("6.12",)': "6.12, one of them all"}

SWEEP = "submitbench-{10,100,250,500,1000}-bos[-no-implicit-sync]"    # the one row that stands for several

class Row(NamedTuple):
  file: str
  source: str
  what: str
  answer: str
  kernels: str

class Other(NamedTuple):
  """A rule that takes more than one call to show."""
  rule: str
  source: str
  tests: tuple[str, ...]                                # file::function

M, K, C, V, G, F = (f"test_{n}.py" for n in ("msm_model", "kgsl_model", "crash", "vm_bind", "gpu", "files"))
OTHERS = [
  # dispatch
  Other("IOWR structs come back also when the call fails, IOW structs never", "drm_ioctl.c",
        (f"{M}::test_iowr_copies_back_on_failure", f"{M}::test_iow_copies_nothing_back")),
  Other("DRM_VERSION: name msm, minor by kernel", "msm_drv.c", (f"{M}::test_version_is_matched_by_name", f"{M}::test_uapi_minor")),
  Other("an unplugged device answers ENODEV", "drm_ioctl.c", (f"{C}::test_an_unplugged_device_answers_enodev",)),
  Other("of several wrong things the first in the order of checks is reported", "msm_gem_submit.c, kgsl_ioctl.c, adreno_dispatch.c",
        (f"{M}::test_the_first_of_several_wrong_things_is_reported", f"{K}::test_the_first_of_several_wrong_things_is_reported")),
  Other("no descriptor for the out-fence: EMFILE before the tables are looked at", "msm_gem_submit.c",
        (f"{M}::test_no_descriptor_left_for_the_out_fence",)),
  Other("a reserved descriptor is given back when the submit fails", "msm_gem_submit.c", (f"{M}::test_no_descriptor_is_leaked",)),
  # lifetimes and mapping
  Other("GEM_NEW, mmap, GET_IOVA make no PTEs, a listing submit does, they stay", "msm_gem.c", (f"{M}::test_pte_states",)),
  Other("an unlisted BO works until memory pressure evicts it", "msm_gem_shrinker.c",
        (f"{M}::test_an_unlisted_bo_works_until_memory_gets_short", f"{M}::test_an_unlisted_bo_faults_although_its_ptes_exist")),
  Other("the shrinker evicts idle WILLNEED BOs with swap, purges DONTNEED ones", "msm_gem_shrinker.c",
        (f"{M}::test_shrinker_evicts_idle_bos_only", f"{M}::test_shrinker_purges_dontneed")),
  Other("close of a busy BO: up to 6.16 it lives to the job's end, later the call waits", "msm_gem.c",
        (f"{M}::test_close_of_a_busy_bo_keeps_it_to_job_end", f"{M}::test_close_of_a_busy_bo_waits_from_6_17_on")),
  Other("work of a closed file: run up to 6.16, dropped later", "msm_submitqueue.c", (f"{M}::test_work_of_a_closed_file",)),
  Other("a CPU mapping outlives handle and file; new memory is zero", "drm_gem.c",
        (f"{M}::test_mappings_share_memory_and_survive_close", f"{M}::test_new_memory_is_zero_and_addresses_are_reused")),
  Other("private VM of each open, or one shared VM", "adreno_gpu.c, msm_iommu.c",
        (f"{M}::test_two_opens_are_two_address_spaces", f"{M}::test_the_shared_vm_is_one_for_all")),
  Other("GPU_READONLY omits the write permission", "msm_gem.c", (f"{M}::test_gpu_readonly",)),
  Other("pages count against memory on first touch or pin", "msm_gem.c", (f"{M}::test_memory_limit_counts_pages_not_handles",)),
  Other("CACHED BOs need the client's cache maintenance, WC and COHERENT none", "msm_drm.h", (f"{M}::test_cached_bos_are_not_coherent",)),
  Other("only listed BOs are resident; low bits of submit_offset are dropped; IB_TARGET is not run, CTX_RESTORE on a switch",
        "msm_gem_submit.c, a6xx_gpu.c",
        (f"{M}::test_only_the_listed_are_resident", f"{M}::test_submit_offset_drops_low_bits_and_ib_targets_are_not_run")),
  Other("relocs patch the stream (6.1)", "msm_gem_submit.c", (f"{M}::test_relocs_on_6_1",)),
  # fences and ordering
  Other("fences are a queue's own; a closed queue's work runs", "msm_submitqueue.c",
        (f"{M}::test_fences_of_two_queues_are_apart", f"{M}::test_a_closed_queue_still_runs_its_work")),
  Other("deadlines are absolute CLOCK_MONOTONIC; a passed one polls; a signal ends the wait", "msm_drv.c",
        (f"{M}::test_deadlines_are_absolute_on_an_injectable_clock", f"{M}::test_an_interrupt_leaves_the_wait")),
  Other("implicit sync orders writers across queues and files, NO_IMPLICIT does not, 6.1 orders writers all the same", "msm_gem_submit.c",
        (f"{M}::test_implicit_sync_orders_writers_across_queues", f"{M}::test_no_implicit_does_not_wait",
         f"{M}::test_6_1_orders_writers_despite_no_implicit", f"{M}::test_two_imports_of_one_buffer_on_two_files_share_fences")),
  Other("one scheduler entity per priority and file", "msm_submitqueue.c", (f"{M}::test_one_entity_per_priority",)),
  Other("sync_file out and in, CLOEXEC; syncobjs", "msm_gem_submit.c, drm_syncobj.c",
        (f"{M}::test_sync_file_out_and_in", f"{M}::test_syncobjs_can_be_signalled_reset_and_destroyed", f"{M}::test_syncobj_wait_any_and_all")),
  Other("priority orders what is queued, nothing preempts", "msm_submitqueue.c",
        (f"{G}::test_priorities_order_what_is_queued_and_nothing_preempts",)),
  # failures
  Other("a killed submit's fence signals; QUERY FAULTS and PARAM FAULTS count; of an exited task: every file sees it", "msm_gpu.c",
        (f"{M}::test_hang_signals_the_fence_and_moves_only_counters", f"{M}::test_hang_of_a_closed_file_counts_globally")),
  Other("an SMMU fault is invisible to the client, the submit completes", "adreno_gpu.c", (f"{M}::test_smmu_fault_is_invisible",)),
  Other("hang check: whole seconds, three progress retries since progress()", "msm_gpu.c",
        (f"{C}::test_ticks_are_whole_seconds_and_progress_buys_three", f"{C}::test_a_fence_that_moves_resets_the_check",
         f"{C}::test_nothing_is_checked_when_nothing_is_queued")),
  Other("one devcoredump, of the first fault of a submit; contents with BO_DUMP", "msm_gpu.c, adreno_gpu.c",
        (f"{C}::test_one_dump_is_kept_and_the_first_fault_makes_it", f"{C}::test_a_hang_dump_holds_the_ring_and_the_contents_that_were_asked_for")),
  Other("log lines of CP errors, faults, recovery, lockups", "a6xx_gpu.c, adreno_gpu.c, msm_gpu.c",
        ("test_reports.py::test_msm_logs_a_cp_error_and_the_recovery", "test_reports.py::test_cp_interrupts",
         "test_reports.py::test_msm_limits_the_rate_of_fault_lines")),
  # VM_BIND
  Other("VM_BIND: mappings split, several addresses, references, in-fences", "msm_gem_vma.c",
        (f"{V}::test_a_mapping_over_others_splits_them", f"{V}::test_the_same_pages_at_two_addresses", f"{V}::test_a_bound_bo_outlives_its_handle",
         f"{V}::test_jobs_of_a_bind_queue_wait_for_their_fences", f"{V}::test_what_is_bound_is_there_without_a_list")),
  Other("a hang makes a VM_BIND VM unusable: EPIPE, pending jobs are no-ops", "msm_gpu.c", (f"{V}::test_a_hang_makes_the_vm_unusable",)),
  # dma-buf
  Other("an export outlives handle and file; a foreign buffer is imported by reference", "drm_prime.c",
        (f"{M}::test_export_outlives_handle_and_file", f"{M}::test_import_of_a_foreign_buffer")),
  Other("/dev/dma_heap/system", "dma-heap.c", (f"{F}::test_dma_heap_refuses_what_the_kernel_refuses",)),
  # IGT
  Other("IGT msm_submit@valid-submit", "igt tests/msm/msm_submit.c", (f"{M}::test_valid_submit",)),
  Other("IGT msm_recovery@hangcheck, gpu-fault, gpu-fault-parallel", "igt tests/msm/msm_recovery.c",
        (f"{M}::test_recovery", f"{M}::test_recovery_leaves_other_files_alone")),
  Other("IGT msm_recovery@iova-fault", "igt tests/msm/msm_recovery.c", (f"{M}::test_iova_fault",)),
  Other("IGT msm_mapping@ring, sqefw, shadow; memptrs and what a630 lacks", "igt tests/msm/msm_mapping.c",
        (f"{C}::test_igt_msm_mapping", f"{C}::test_igt_msm_mapping_memptrs_is_open_without_hw_apriv",
         f"{C}::test_igt_msm_mapping_skips_what_an_a630_does_not_have")),
  Other("IGT msm_shrink@copy-{gpu,mmap,mmap-dmabuf}-sanitycheck, -oom, -madvise", "igt tests/msm/msm_shrink.c",
        (f"{M}::test_igt_msm_shrink", f"{M}::test_igt_msm_shrink_oom_and_madvise")),
  # KGSL
  Other("KGSL copies nothing back on failure", "kgsl_ioctl.c", (f"{K}::test_nothing_is_copied_back_on_failure",)),
  Other("USE_CPU_MAP: the GPU's address is the CPU's, from one window, around what the process has there", "kgsl_iommu.c",
        (f"{K}::test_gpu_address_is_the_cpu_address", f"{K}::test_mmap_avoids_what_the_process_has_there",
         f"{K}::test_mmap_hint_that_the_process_occupies", f"{K}::test_host_memory_at_its_own_address")),
  Other("an object goes with free and munmap, in any order; free does not wait, free on an event does", "kgsl.c",
        (f"{K}::test_object_goes_with_free_and_munmap_in_any_order", f"{K}::test_free_does_not_wait_and_event_free_does")),
  Other("memory is the process's, contexts are the file's", "kgsl.c",
        (f"{K}::test_memory_is_the_process_s_contexts_the_file_s", f"{K}::test_closing_the_last_file_releases_everything")),
  Other("timestamps: order, wrap, relative and endless waits, future fences", "adreno_dispatch.c, kgsl_events.c",
        (f"{K}::test_timestamps_move_in_order", f"{K}::test_timestamps_wrap", f"{K}::test_wait_forever",
         f"{K}::test_fences_of_timestamps_still_to_come", f"{K}::test_commands_wait_for_other_contexts_and_fences")),
  Other("a full queue blocks, then ETIMEDOUT", "adreno_dispatch.c", (f"{K}::test_a_full_queue_blocks_then_times_out",)),
  Other("EPROTO: queued, the timestamp hidden", "adreno_dispatch.c", (f"{K}::test_eproto_queues_but_hides_the_timestamp",)),
  Other("EDEADLK: invalid at once with NO_FAULT_TOLERANCE, else after 4 faults in 3 s; for ever", "adreno_dispatch.c",
        (f"{K}::test_no_fault_tolerance_invalidates_at_once", f"{K}::test_four_faults_in_three_seconds_invalidate")),
  Other("an SMMU fault stalls the GPU: the rest of the command does not run, the context learns of it", "kgsl_iommu.c",
        ("test_reports.py::test_kgsl_logs_a_page_fault_with_its_neighbours_and_stops_there",
         "test_gpu_trouble.py::test_a_translation_fault_is_reported")),
  Other("reset status: guilty, innocent; reading clears", "adreno.c", (f"{K}::test_reset_status_names_guilty_and_innocent",)),
  Other("destroying a context waits and detaches", "adreno_drawctxt.c", (f"{K}::test_destroy_waits_for_the_gpu_and_detaches",)),
  Other("log lines of page faults and of commands that are given up", "kgsl_iommu.c, adreno_dispatch.c",
        ("test_reports.py::test_kgsl_logs_a_page_fault_with_its_neighbours_and_stops_there",)),
]

NOT_MODELLED = """MSM: performance counters (SYSPROF and PERFCNTR_CONFIG answer as to a client without CAP_PERFMON), MAP_NULL (the SMMU has no PRR),
SIGBUS on CPU access to purged memory (mmap gives ENOMEM), EINTR inside the submit ioctl (tests inject it), registers in a devcoredump, debugfs
other than `gem`.
KGSL: sparse and secure memory, performance counters, the submit calls before GPU_COMMAND, preemption between priorities, replay of a faulted command
(a command with fault tolerance is skipped), 4.19 and later trees."""

@functools.cache
def rows() -> list[Row]:
  out = []
  for file, (answer, kernels) in TABLES.items():
    source = (HERE / file).read_text()
    lines = source.splitlines(keepends=True)
    def segment(n: ast.expr, lines: list[str] = lines) -> str:
      part = lines[n.lineno - 1:n.end_lineno]           # ASCII, so that columns are characters
      part[-1] = part[-1][:n.end_col_offset]
      part[0] = part[0][n.col_offset:]
      return "".join(part)
    for node in ast.walk(ast.parse(source)):
      if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "R" and len(node.args) >= 3): continue
      text = [segment(a) for a in node.args]
      where, what = (ast.literal_eval(a) if isinstance(a, ast.Constant) else SWEEP for a in node.args[:2])
      want = text[3] if len(text) > 3 else answer
      ks = text[4] if len(text) > 4 and file == "test_msm_model.py" else ""
      want = {"0": "ok", "None": "ok"}.get(want, want.replace("errno.", ""))
      out.append(Row(file, where, what, want.replace("|", "\\|"), KERNELS[ks] if ks else kernels))
  return out

def page() -> str:
  out = ["# Rules of the kernels and their tests", "",
         "Made by `python -m test.virtual.kernel_rules`; a test holds it to be current and every test named here to exist. The sources are the",
         "kernels' own: `drivers/gpu/drm/msm` and the DRM core for mainline, `drivers/gpu/msm` of msm-4.9 for KGSL. All of it is executed on the",
         "kernel models, none of it was compared with a running kernel.", ""]
  titles = {"test_msm_model.py": "MSM DRM", "test_vm_bind.py": "MSM DRM: VM_BIND", "test_kgsl_model.py": "KGSL"}
  for file, title in titles.items():
    out += [f"## {title}: one call, one answer", "", f"Each row is a case of `{file}::test_rule`.", "",
            "| kernel function | case | answer | kernels |", "|---|---|---|---|"]
    out += [f"| {r.source} | {r.what.replace('|', chr(92) + '|')} | {r.answer} | {r.kernels} |" for r in rows() if r.file == file] + [""]
  out += ["## Rules that take more than a call", "", "| rule | source | tests |", "|---|---|---|"]
  out += [f"| {o.rule} | {o.source} | {', '.join(f'`{t}`' for t in o.tests)} |" for o in OTHERS]
  return "\n".join(out + ["", "## Not modelled", "", NOT_MODELLED, ""])

if __name__ == "__main__": print(page(), end="")
