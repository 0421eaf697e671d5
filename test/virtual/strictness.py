"""Every strictness check of the virtual Adreno: what it watches, a test in which it fires, and what shows that the runtime came by it and passed.

docs/virtual-adreno.md prints this table; test_strictness.py holds it to be complete, and runs the runtime through all of it.
"""
from __future__ import annotations
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

@dataclass
class Seen:
  """What a strict run of the runtime on one kernel did, gathered dispatch by dispatch."""
  kind: str = ""
  counters: Counter[str] = field(default_factory=Counter)
  instructions: set[str] = field(default_factory=set)
  opcodes: set[int] = field(default_factory=set)
  registers: dict[int, set[int]] = field(default_factory=dict)
  loads: set[str] = field(default_factory=set)
  threads: int = 0                                      # of the largest workgroup
  pvt_bytes: int = 0
  images: int = 0
  per_submit: int = 0                                   # dispatches in one submit
  rewritten: int = 0                                    # times the CPU wrote what an earlier submit had read

READING_PACKETS = {0x14, 0x3c, 0x41, 0x42, 0x44, 0x45, 0x73, 0x75}      # WAIT_MEM_GTE .. MEMCPY: the CP reads memory

class Check(NamedTuple):
  watches: str
  fires: str                                            # file::function
  met: Callable[[Seen], Any]                            # true if the run came by this check

def memory(s: Seen) -> bool: return s.counters["bytes_read"] > 0 and s.counters["bytes_written"] > 0
def any_dispatch(s: Seen) -> bool: return s.counters["dispatches"] > 0
def local(s: Seen) -> bool: return bool(s.instructions & {"ldl.u32", "stl.u32"})
def private(s: Seen) -> bool: return any(n.startswith(("ldp", "stp")) for n in s.instructions)
def never_reads(s: Seen) -> bool: return bool(s.opcodes) and not s.opcodes & READING_PACKETS
G, P, E, I = (f"test_{n}.py" for n in ("gpu", "cp", "ir3_engine", "ir3_images"))

CHECKS: dict[str, Check] = {
  "unmapped": Check("an address without a BO", f"{G}::test_out_of_bounds_is_told_apart_from_the_neighbour", memory),
  "not_resident": Check("a BO that the submit does not list (MSM)", f"{G}::test_every_kind_of_buffer_is_missed_by_name",
                        lambda s: s.kind == "KGSL" or s.counters["submit_bos"] > 0),
  "readonly": Check("a write to a GPU_READONLY BO", f"{P}::test_readonly_buffers_fault_with_permission", memory),
  "privileged": Check("the kernel's own buffers", "test_crash.py::test_igt_msm_mapping", memory),
  "misaligned": Check("accesses aligned to their element, the CP's to a dword", f"{E}::test_readonly_and_not_resident_and_misaligned", memory),
  "cp_error": Check("packet headers, counts, opcodes, registers that exist and may be written", f"{P}::test_bad_headers_stop_the_cp_at_their_dword",
                    lambda s: s.counters["packets"] > 300),
  "hang": Check("waits and programs that end", f"{P}::test_an_unsatisfied_wait_is_a_hang_that_names_the_buffer_and_later_jobs_run", any_dispatch),
  "field_overflow": Check("values that fit their register's fields", f"{P}::test_bits_outside_a_field_are_reported_and_dropped",
                          lambda s: len(s.registers) > 30),
  "stale_register": Check("registers a dispatch depends on, written in its submit; others hold poison",
                          f"{G}::test_a_register_left_to_the_previous_client_is_reported",
                          lambda s: 0xae04 in s.registers and 0xbb11 in s.registers),
  "fixed_register": Check("registers with one right value on this chip", f"{G}::test_a_chip_value_that_differs_is_reported",
                          lambda s: s.registers.get(0xae03) == {0x1430}),
  "stale_state": Check("shader, constants, descriptors loaded in this submit", f"{G}::test_update_cntl_drops_queued_loads",
                       lambda s: s.loads >= {"shader", "constants", "texture", "sampler", "uav"}),
  "load_state_changed": Check("memory of queued state loads, unchanged until the dispatch",
                              f"{G}::test_state_memory_must_not_change_before_the_dispatch", lambda s: s.loads),
  "constlen": Check("CONSTLEN in its unit", f"{G}::test_the_slips_of_tinygrad_0_14_are_named_and_can_be_tolerated",
                    lambda s: all(v & 0xff for v in s.registers.get(0xb987, {0}))),
  "limit": Check("threads and registers of a workgroup", f"{G}::test_a_workgroup_that_does_not_fit_is_refused", lambda s: s.threads >= 128),
  "bad_state": Check("state that contradicts itself: sizes, alignments, register ids, descriptors", f"{G}::test_wrong_state_is_reported",
                     any_dispatch),
  "pvt_mem": Check("private memory for every fiber of both SPs, and the call stack", f"{G}::test_private_memory_must_hold_every_fiber_of_both_sps",
                   lambda s: s.pvt_bytes > 0),
  "icache_bound": Check("the workaround for programs above 64 groups", f"{G}::test_programs_beyond_the_instruction_cache_need_the_workaround",
                        lambda s: max(s.registers.get(0xa9bc, {0})) > 64),
  "fetch_bounds": Check("the declared program, all of it mapped", f"{G}::test_wrong_state_is_reported", lambda s: s.registers.get(0xa9bc)),
  "unflushed_read": Check("CP reads of what is dirty in UCHE", f"{G}::test_cp_reads_of_unflushed_results_are_reported", never_reads),
  "cp_order": Check("CP reads of its own posted writes", f"{P}::test_cp_must_wait_for_its_own_writes", never_reads),
  "stale_line": Check("an invalidate between the CPU's write and a shader's read", f"{G}::test_cpu_writes_between_submits_need_an_invalidate",
                      lambda s: s.rewritten > 1),
  "missing_wait": Check("a wait between dependent dispatches", f"{G}::test_dependent_dispatches_need_a_wait", lambda s: s.per_submit > 2),
  "unknown_instruction": Check("encodings that exist", f"{G}::test_data_instead_of_code_stops_with_the_encoding",
                               lambda s: len(s.instructions) > 20),
  "unsupported": Check("state that is not modelled: stops instead of guessing", f"{G}::test_wrong_state_is_reported", any_dispatch),
  "fetch_past_end": Check("a program's `end`", f"{G}::test_a_program_without_end_runs_out_of_its_declared_size", lambda s: "end" in s.instructions),
  "undefined_register": Check("registers written before they are read", f"{E}::test_undefined_registers_are_reported_where_they_are_used",
                              lambda s: s.counters["lane_instructions"] > 0),
  "undefined_const": Check("constants loaded and within CONSTLEN", f"{E}::test_undefined_consts_and_local_memory",
                           lambda s: "constants" in s.loads),
  "undefined_local": Check("local memory written before it is read", f"{E}::test_undefined_consts_and_local_memory", local),
  "undefined_private": Check("private memory written before it is read", f"{E}::test_private_memory_is_read_only_where_the_fiber_wrote", private),
  "branch_stack": Check("diverged fibers against BRANCHSTACK", f"{E}::test_the_branch_stack_must_hold_every_place_where_fibers_wait",
                        lambda s: any(v >> 14 & 63 for v in s.registers.get(0xa9b0, {0}))),
  "local_out_of_bounds": Check("local memory as declared", f"{E}::test_local_and_private_bounds", local),
  "private_out_of_bounds": Check("private memory as declared", f"{E}::test_local_and_private_bounds",
                                 private),
  "out_of_bounds": Check("descriptors that are there", f"{I}::test_mismatched_and_missing_descriptors_are_reported", lambda s: s.images > 0),
  "image_type": Check("an image's format and the instruction's type", f"{I}::test_mismatched_and_missing_descriptors_are_reported",
                      lambda s: s.images > 0),
  "barrier_divergence": Check("barriers that all fibers reach", f"{E}::test_barrier_in_divergent_flow_is_reported",
                              lambda s: any(n.startswith("bar") for n in s.instructions)),
}

class Behaviour(NamedTuple):
  """A way to be strict that is no finding of its own: what it brings out, and how the runtime does under it."""
  what: str
  fires: tuple[str, ...]
  passes: tuple[str, ...]

BEHAVIOURS = [
  Behaviour("memory shared with the CPU's caches: cleaned once, then rewritten", ("test_msm_model.py::test_cached_bos_are_not_coherent",),
            ("test_external_memory.py::test_a_frame_that_is_rewritten_is_computed_on_not_only_copied",
             "test_external_memory.py::test_the_gpu_s_writes_reach_whoever_reads_the_memory")),
  Behaviour("submits as late as allowed, or at random", (f"{G}::test_seeded_schedules_reorder_what_nobody_waited_for",
                                                          f"{G}::test_late_jobs_start_when_somebody_asks"),
            ("test_modes.py::test_eager_and_replays_whatever_the_order_of_events",
             "test_modes.py::test_replays_in_flight_do_not_disturb_each_other")),
  Behaviour("workgroups forward, reversed, in random order", ("test_strictness.py::test_the_order_of_workgroups_shows_in_a_race",),
            ("test_strictness.py::test_the_runtime_passes_every_check",)),
  Behaviour("registers poisoned before each launch", (f"{G}::test_registers_of_an_earlier_submit_do_not_count",),
            ("test_strictness.py::test_the_runtime_passes_every_check",)),
  Behaviour("the always-on counter near 2^32 and 2^48", ("test_strictness.py::test_half_a_timestamp_runs_backwards",),
            ("test_strictness.py::test_times_are_true_where_the_counter_carries",)),
  Behaviour("known slips of the unmodified driver tolerated, nothing else", (f"{G}::test_tolerating_the_known_slips_tolerates_nothing_else",),
            ("test_kgsl_model.py::test_unmodified_tinygrad_passes_its_tiny_tests",)),
  Behaviour("errors reach the thread that waits, at once", ("test_msm_model.py::test_the_waiter_is_told_of_violations",
                                                            "test_kgsl_model.py::test_the_waiter_is_told_of_violations",
                                                            f"{G}::test_a_bug_of_the_model_ends_the_job_and_says_so"),
            ("test_strictness.py::test_an_error_of_the_emulator_reaches_the_thread_that_waits",
             "test_crash.py::test_the_runtime_under_a_kernel_that_kills_by_the_clock",)),
]

def table() -> str:
  """For docs/virtual-adreno.md."""
  out = ["| check | watches | fires in |", "|---|---|---|"] + [f"| `{k}` | {c.watches} | `{c.fires}` |" for k, c in CHECKS.items()]
  out += ["", "| and | fires in | the runtime passes in |", "|---|---|---|"]
  return "\n".join(out + [f"| {b.what} | {', '.join(f'`{t}`' for t in b.fires)} | {', '.join(f'`{t}`' for t in b.passes)} |" for b in BEHAVIOURS])

if __name__ == "__main__": print(table())
