// The UCHE model's maintenance operations, over the table of segments that the shader core uses too (memory.SEG). A segment without `cache` is
// not modelled. `line` has one byte a 64-byte line, padded to whole words with zeros.
#include <stdint.h>
#include <string.h>

typedef uint8_t u8; typedef uint32_t u32; typedef uint64_t u64;
struct seg { u64 iova, size; u8 *ram, *cache, *line; u32 flags, bo; };
enum { RESIDENT = 4 };
enum { VALID = 1, DIRTY = 2, STALE = 4, UNSETTLED = 8, OLD = 16 };
#define API __attribute__((visibility("default")))
#define ALL(mask) ((mask) * 0x0101010101010101ull)

static u64 line_bytes(const struct seg *s, u64 i) { return s->size - i * 64 < 64 ? s->size - i * 64 : 64; }

// Runs the statement for every line of every modelled segment that has one of the bits of `mask`; s, i and b (its state) are in scope.
#define EACH(mask, body) \
  for (u32 k_ = 0; k_ < n; k_++) { \
    struct seg *s = &segs[k_]; \
    if (!s->cache) continue; \
    u64 words = (s->size + 511) / 512; \
    for (u64 w_ = 0; w_ < words; w_++) { \
      u64 state; \
      memcpy(&state, s->line + w_ * 8, 8); \
      if (!(state & ALL(mask))) continue; \
      for (u64 i = w_ * 8; i < w_ * 8 + 8; i++) { u8 b = s->line[i]; if (b & (mask)) { body } } \
    } \
  }

API u64 uche_flush(struct seg *segs, u32 n) {  // returns the number of lines written to memory
  u64 total = 0;
  EACH(DIRTY, memcpy(s->ram + i * 64, s->cache + i * 64, line_bytes(s, i)); s->line[i] = b & ~DIRTY; total++;)
  return total;
}

API u32 uche_invalidate(struct seg *segs, u32 n) {  // returns whether dirty lines remain
  u32 dirty = 0;
  EACH(VALID, if (b & DIRTY) dirty = 1; else s->line[i] = 0;)
  return dirty;
}

API u64 uche_mark_stale(struct seg *segs, u32 n) {  // returns the number of clean lines that differ from memory
  u64 total = 0;
  EACH(VALID, if (!(s->flags & RESIDENT) || b & DIRTY) continue;
    u8 stale = memcmp(s->ram + i * 64, s->cache + i * 64, line_bytes(s, i)) != 0;
    s->line[i] = stale ? b | STALE : b & ~STALE; total += stale;)
  return total;
}

API void uche_unsettle(struct seg *segs, u32 n, u32 first) { EACH(DIRTY, s->line[i] = (b & ~DIRTY) | OLD | (first ? 0 : UNSETTLED);) }
API void uche_settle(struct seg *segs, u32 n) { EACH(OLD | UNSETTLED, s->line[i] = (b & ~(OLD | UNSETTLED)) | (b & OLD ? DIRTY : 0);) }
API void uche_reset(struct seg *segs, u32 n) { EACH(0xff, s->line[i] = 0;) }

API u32 uche_read(struct seg *segs, u32 at, u64 off, u64 len, u8 *out) {  // fills lines; returns the union of their states
  struct seg *s = &segs[at];
  u32 seen = 0;
  for (u64 i = off / 64; i * 64 < off + len; i++) {
    if (!(s->line[i] & VALID)) { memcpy(s->cache + i * 64, s->ram + i * 64, line_bytes(s, i)); s->line[i] |= VALID; }
    seen |= s->line[i];
  }
  memcpy(out, s->cache + off, len);
  return seen;
}
