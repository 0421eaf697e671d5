"""Every row of the instruction table has a proof: a test of this folder that executes the row and compares with an independent computation."""
import importlib, re
import pytest
from test.mockgpu.qcom.ir3.isa import ATOMICS, CONDS, LEFT_OUT, ROWS
from test.virtual import conftest

T, W = "f16|f32|u16|u32|s16|s32", "f16|f32|u16|u32|s16|s32|u8"
# Regular expression for whole mnemonics -> test. A new row needs a line here and a test behind it.
PROOFS = {
  "add.f|min.f|max.f|mul.f|sign.f|absneg.[fs]|(floor|ceil|rndne|rndaz|trunc).f|(add|sub|min|max).[us]|(and|or|not|xor).b|mul.[us]24|mull.u|"
  "(bfrev|shl|shr|ashr|getbit|cbits).b|clz.[sb]|mad.[us](16|24)|madsh.[um]16|mad.f(16|32)|sel.b(16|32)|sad.s(16|32)|sh[rl][mg]|andg":
    "proofs::test_alu_row_computes_what_numpy_does",
  f"cmp[sv].[fus].({'|'.join(CONDS)})": "proofs::test_alu_row_computes_what_numpy_does",
  "rcp|rsq|log2|exp2|sin|cos|sqrt|hrsq|hlog2|hexp2": "proofs::test_special_function_is_within_its_bound",
  f"cov.({T})({T})": "proofs::test_conversion",
  "cov.u8[us](16|32)": "proofs::test_bytes_convert_with_the_a6xx_sign_oddity",
  "cov.[us](16|32)u8": "proofs::test_narrowing_to_a_byte_keeps_the_low_eight_bits",
  rf"mov.({T})\1|(swz|gat|sct).({T})\3": "proofs::test_moves_of_every_type_copy_bits",
  "mov.u8u8": "proofs::test_byte_moves_keep_the_low_byte",
  "movmsk": "proofs::test_movmsk_gives_the_active_fibers",
  f"(ld|st)[glp].({W})": "proofs::test_memory_of_every_type",
  "br|brao|braa|bany|ball": "engine::test_branch_kinds",
  "jump": "engine::test_loop_with_different_trip_counts",
  "getone|call|ret": "engine::test_getone_takes_one_fiber_and_call_returns",
  "end": "engine::test_early_end_lets_the_others_go_on",
  "nop|predt|predf|prede": "engine::test_predication_masks_writes_and_stores",
  "bar": "engine::test_barrier_between_local_store_and_load",
  "fence|icinv|sleep|tcinv": "coverage::test_instructions_without_a_functional_effect_leave_everything_alone",
  "getlast": "subgroups::test_getlast_sends_all_but_the_last_fiber_of_the_first_cluster",
  "brac": "subgroups::test_brac_tests_the_boolean_constant_mask",
  "shps|shpe": "subgroups::test_a_preamble_runs_before_the_rest",
  "shfl": "subgroups::test_shfl_takes_the_value_of_a_fiber_at_a_distance",
  "brcst.active": "subgroups::test_brcst_gives_the_lower_halfs_last_active_value_to_the_upper_half",
  "quad_shuffle.(brcst|horiz|vert|diag)": "subgroups::test_quad_shuffles",
  "isam|ldib.b": "images::test_every_format_is_read_as_numpy_converts_it",
  "isaml": "images::test_layers_slices_offsets_and_slots_from_registers",
  "sam|saml": "images::test_sampling_with_filters_wraps_and_borders",
  "stib.b": "images::test_every_format_is_written_as_numpy_converts_it",
  "getsize|resinfo.b": "memory::test_sizes_of_images_and_buffers",
  f"atomic.([gb].)?({'|'.join(ATOMICS.values())})": "memory::test_atomics_of_every_kind_of_memory",
  f"(ldg|stg).a.({W})": "memory::test_indexed_addresses",
  "ldc": "memory::test_constant_buffers_by_immediate_and_register",
  "ldc.k|stc.[fus]32|ldg.k.[fus]32": "memory::test_programs_write_constants",
}

def test_every_row_has_a_proof_and_every_proof_a_row():
  used = set()
  for r in ROWS:
    mine = [p for p in PROOFS if re.fullmatch(p.replace(".", r"\."), r.name)]
    assert len(mine) == 1, f"{r.name}: {'no proof' if not mine else 'several entries'}"
    used.update(mine)
  assert used == PROOFS.keys(), PROOFS.keys() - used
  for where in PROOFS.values():
    module, name = where.split("::")
    assert callable(getattr(importlib.import_module(f"test.virtual.test_ir3_{module}"), name)), where

def test_instructions_without_a_functional_effect_leave_everything_alone():
  """Fences and cache operations order accesses that are in order here already; sleep takes time."""
  import numpy as np
  from test.virtual.ir3_lab import run
  x = np.arange(64, dtype=np.uint32)
  before = conftest.executed()
  out = run("fence.g.l.r.w\n(sy)icinv\nsleep.l\ntcinv\nadd.u r2.x, r1.x, 1", {"r1.x": x}, {"r2.x": np.uint32})
  assert (out["r2.x"] == x + 1).all()
  after = conftest.executed()
  assert all(after[n] > before.get(n, 0) for n in ("fence", "icinv", "sleep", "tcinv", "add.u")), "not counted"

@pytest.mark.parametrize("name", ("kill", "brax", "sel.f32", "gather4r", "getfiberid", "ldlw"))
def test_what_is_left_out_is_listed_with_its_reason(name):
  assert [why for n, why in LEFT_OUT.values() if n == name and len(why) > 5]
