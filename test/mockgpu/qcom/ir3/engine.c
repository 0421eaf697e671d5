// The fast shader core: runs translated IR3 programs, one 64-fiber wave at a time, registers as structure of arrays.
//
// A program is an array of micro-ops (struct uop). Each names a handler that works on whole waves: operands are byte offsets from the wave
// context to 64-lane vectors of u32 or u16. Lane arithmetic comes from lanes.h, which native.py generates from the instruction table; what is
// written here is masks, control flow, memory, images. Handlers chain by tail call. There are two handler tables: `full` ignores the execution
// mask (every live fiber is active, dead lanes may be clobbered), `masked` blends.
//
// Divergence: fibers that left the running set wait at a micro-op index; the set with the smallest index runs, sets meet at block starts.
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef int32_t s32; typedef int64_t s64;

#define WAVE 64
#define TAIL __attribute__((musttail)) return
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define VECTOR _Pragma("clang loop vectorize(assume_safety)")
#define NONE 0xffffffffu

enum { SEG_READ = 1, SEG_WRITE = 2, SEG_RESIDENT = 4 };
enum { LINE_VALID = 1, LINE_DIRTY = 2, LINE_STALE = 4, LINE_UNSETTLED = 8 };
enum { RET_END, RET_BAR, RET_STOP };
// Order is mirrored by native.FAULTS.
enum { F_UNMAPPED, F_NOT_RESIDENT, F_READONLY, F_OUT_OF_BOUNDS, F_MISALIGNED, F_UNDEFINED_REGISTER, F_UNDEFINED_CONST, F_UNDEFINED_LOCAL,
       F_FETCH_PAST_END, F_LOCAL_OUT_OF_BOUNDS, F_PRIVATE_OUT_OF_BOUNDS, F_HANG, F_BARRIER_DIVERGENCE, F_STALE, F_UNSETTLED, F_STACK, F_IMAGE,
       F_UNDEFINED_PRIVATE, F_BRANCH_STACK };

struct seg { u64 iova, size; u8 *ram, *cache, *line; u32 flags, bo; };
struct fault { u64 addr; u32 kind, pc, lane, size, write, wg[3]; };
// kind: 0 = no descriptor, KIND_*. bits, comps: of the texel. texel, pitch, layer: bytes. A buffer has `width` elements and one row.
enum { KIND_FLOAT = 1, KIND_UNORM, KIND_SNORM, KIND_UINT, KIND_SINT };
struct image { u64 base, layer; u32 width, height, depth, pitch, texel, kind, bits, comps, swiz, buffer; };
enum { WRAP_REPEAT, WRAP_EDGE, WRAP_MIRROR, WRAP_BORDER };
struct sampler { u32 wrap[3], linear_mag, linear_min, unnorm, border[4]; };
struct uni { s32 off; u32 kind, val; };
struct uop { u16 op, aux; s32 d, a, b, c, imm; u32 pc, x; };

struct run {
  const struct uop *uops; const struct uni *unis; const u32 *consts; const s32 *poison; const struct seg *segs;
  const struct image *tex, *uav, *ubo; const struct sampler *samp; volatile s32 *abort; struct fault *faults; u64 *bb; const s32 *def_init;
  u64 seed, bytes_read, bytes_written; s64 budget;
  u32 nuni, npoison32, npoison16, nsegs, ntex, nuav, nubo, nsamp, nbb, wave_bytes, def_base, ndefs, ndef_init;
  u32 groups[3], local[3], size[3], goff[3];  // size: threads of the grid, so that the last groups may be partial; goff: global offset
  s32 ids[13];  // vectors of local id, workgroup id, size, offset (3 each), linear local id; 0 = absent
  u32 local_bytes, pvt_bytes, order, threads, max_faults, nfaults, strict_local, hang, cf_mask, own_consts, branch_stack;
};

typedef struct worker {
  struct run *run; u64 *bb; u8 *local, *local_def; u32 *consts; u64 bytes_read, bytes_written;
} worker;

struct park { u32 u; u64 m; };
#define CALL_DEPTH 16

typedef struct W {
  u64 exec, live, pred_outer, pred_bits, p[4];
  s64 budget;
  const struct uop *base, *resume; const struct seg *hit;
  struct run *run; worker *wk; u8 *pvt; u64 *pvt_def;  // pvt_def: of each byte, the fibers that have stored it
  u32 npark, next, wg[3], state, deepest;
  u32 m32[WAVE]; u16 m16[WAVE];
  struct park park[WAVE];
  u8 sp[WAVE]; u32 ret[CALL_DEPTH][WAVE];
} __attribute__((aligned(256))) W;
_Static_assert(sizeof(W) <= 8192, "wave header");  // vectors start at 8192, see native.VECTORS

typedef int (*handler)(W *w, const struct uop *u, const void *const *tab);
#define H(name) static int op_##name(W *w, const struct uop *u, const void *const *tab)
#define GO(n) do { const struct uop *n_ = (n); TAIL ((handler)tab[n_->op])(w, n_, tab); } while (0)
#define V32(o) ((u32 *)((char *)w + (o)))
#define V16(o) ((u16 *)((char *)w + (o)))
static const void *const full[], *const masked[];

// *** lane arithmetic

static inline u32 fbits(float x) { u32 b; memcpy(&b, &x, 4); return b; }
static inline float bitsf(u32 b) { float x; memcpy(&x, &b, 4); return x; }
static inline u64 dbits(double x) { u64 b; memcpy(&b, &x, 8); return b; }
static inline double bitsd(u64 b) { double x; memcpy(&x, &b, 8); return x; }
static inline float ftz(float x) { u32 b = fbits(x); return bitsf((b & 0x7f800000u) ? b : b & 0x80000000u); }
static inline u16 ftzh(u16 h) { return (h & 0x7c00) ? h : h & 0x8000; }
static inline float h2f_raw(u16 h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static inline u16 f2h_raw(float f) { _Float16 x = (_Float16)f; u16 h; memcpy(&h, &x, 2); return h; }
// F16C ignores DAZ and FTZ: half subnormals are flushed by hand.
static inline float h2f(u16 h) { return h2f_raw(ftzh(h)); }
static inline u16 f2h(float f) { return ftzh(f2h_raw(f)); }
static inline float rh(float x) { return h2f(f2h(x)); }

// Rounds to a value that binary16 holds. mode: 0 zero, 1 even, 2 up, 3 down.
static inline float rnd_h(float x, int mode) {
  u16 h = f2h_raw(x);
  float f = h2f_raw(h), ax = fabsf(x), af = fabsf(f);
  if (mode == 0) h = af > ax ? h - 1 : h;
  if (mode == 2) h = f < x ? ((h & 0x8000) ? h - 1 : h + 1) : h;
  if (mode == 3) h = f > x ? ((h & 0x8000) ? h + 1 : h - 1) : h;
  return h2f_raw(h);
}
static inline float i2f_f32(double x, int mode) {
  float f = (float)x;
  u32 b = fbits(f);
  double d = (double)f;
  if (mode == 0) b = fabs(d) > fabs(x) ? b - 1 : b;
  if (mode == 2) b = d < x ? (b >> 31 ? b - 1 : b + 1) : b;
  if (mode == 3) b = d > x ? (b >> 31 ? b + 1 : b - 1) : b;
  return bitsf(b);
}
static inline float i2f_f16(double x, int mode) { return rnd_h((float)x, mode); }  // what float cannot hold is far above 65504

static inline s32 f2i_s32(float x) {
  float c = x < -2147483648.0f ? -2147483648.0f : x;
  return x >= 2147483648.0f ? 0x7fffffff : x != x ? 0 : (s32)(c >= 2147483648.0f ? 0.0f : c);
}
static inline u32 f2i_u32(float x) { return x >= 4294967296.0f ? ~0u : x > 0 ? (u32)x : 0u; }
static inline s32 f2i_s16(float x) { float c = x < -32768.0f ? -32768.0f : x > 32767.0f ? 32767.0f : x; return x != x ? 0 : (s32)c; }
static inline u32 f2i_u16(float x) { float c = x > 65535.0f ? 65535.0f : x; return x > 0 ? (u32)(s32)c : 0u; }

static inline s32 sext24(u32 x) { return (s32)(x << 8) >> 8; }
static inline s32 sclamp(s64 x, int w) { s64 hi = ((s64)1 << (w - 1)) - 1, lo = -hi - 1; return (s32)(x > hi ? hi : x < lo ? lo : x); }
static inline u32 bitrev(u32 x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
static inline u32 popcount(u32 x) { return (u32)__builtin_popcount(x); }
static inline s32 clz32(u32 x) { return x ? __builtin_clz(x) : 32; }

// Special functions in double. Polynomials are truncated series; each is good to about 1e-12, so the rounding to float dominates.
static inline float sf_rsq(float x) { return (float)(1.0 / sqrt((double)x)); }

static inline float sf_exp2(float x) {
  double d = x, m = 0x1.8p52;
  d = d > 200.0 ? 200.0 : d < -200.0 ? -200.0 : d;
  double t = d + m, f = (d - (t - m)) * 0.69314718055994530942, p = 1.0 / 39916800.0;
  p = p * f + 1.0 / 3628800.0; p = p * f + 1.0 / 362880.0; p = p * f + 1.0 / 40320.0; p = p * f + 1.0 / 5040.0; p = p * f + 1.0 / 720.0;
  p = p * f + 1.0 / 120.0; p = p * f + 1.0 / 24.0; p = p * f + 1.0 / 6.0; p = p * f + 0.5; p = p * f + 1.0; p = p * f + 1.0;
  return x != x ? x : (float)bitsd(dbits(p) + (dbits(t) << 52));
}
static inline float sf_log2(float x) {
  u64 b = dbits((double)x), up = (b & 0xfffffffffffffull) > 0x6a09e667f3bcdull;
  double m = bitsd((b & 0xfffffffffffffull) | (up ? 0x3fe0000000000000ull : 0x3ff0000000000000ull));
  double e = bitsd((b >> 52) + up + 0x4330000000000000ull) - (4503599627370496.0 + 1023.0);
  double s = (m - 1.0) / (m + 1.0), z = s * s, p = 1.0 / 17.0;
  p = p * z + 1.0 / 15.0; p = p * z + 1.0 / 13.0; p = p * z + 1.0 / 11.0; p = p * z + 1.0 / 9.0; p = p * z + 1.0 / 7.0; p = p * z + 1.0 / 5.0;
  p = p * z + 1.0 / 3.0; p = p * z + 1.0;
  float r = (float)(e + 2.8853900817779268147 * s * p);
  r = x == INFINITY ? x : r;
  r = x == 0.0f ? -INFINITY : r;
  return x < 0.0f || x != x ? NAN : r;
}
// Reduction by quarter turns holds to |x| < 2^27; the compiler reduces to [-pi, pi] beforehand. Beyond, NaN.
static inline float sf_sincos(float x, u64 quarter) {
  double d = x, m = 0x1.8p52, t = d * 0.63661977236758134308 + m, n = t - m;
  double r = ((d - n * 1.57079632673412561417) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21, z = r * r;
  double s = 1.0 / 6227020800.0, c = -1.0 / 87178291200.0;
  s = s * z - 1.0 / 39916800.0; s = s * z + 1.0 / 362880.0; s = s * z - 1.0 / 5040.0; s = s * z + 1.0 / 120.0; s = s * z - 1.0 / 6.0; s = s * z + 1.0;
  c = c * z + 1.0 / 479001600.0; c = c * z - 1.0 / 3628800.0; c = c * z + 1.0 / 40320.0; c = c * z - 1.0 / 720.0; c = c * z + 1.0 / 24.0;
  c = c * z - 0.5; c = c * z + 1.0;
  u64 q = dbits(t) + quarter;
  double v = (q & 1) ? c : r * s;
  v = (q & 2) ? -v : v;
  return fabsf(x) < 134217728.0f ? (float)v : NAN;
}
static inline float sf_sin(float x) { return x == 0.0f ? x : sf_sincos(x, 0); }
static inline float sf_cos(float x) { return sf_sincos(x, 1); }

typedef float reg_f32; typedef u16 reg_f16; typedef u32 reg_u32; typedef s32 reg_s32;
typedef u16 reg_u16; typedef u16 reg_s16; typedef u16 reg_u8; typedef u16 reg_s8;
typedef float val_f32; typedef float val_f16; typedef u32 val_u32; typedef s32 val_s32;
typedef u32 val_u16; typedef s32 val_s16; typedef s32 val_s8;
static inline float ld_f32(float x) { return x; }
static inline float ld_f16(u16 x) { return h2f(x); }
static inline u32 ld_u32(u32 x) { return x; }
static inline s32 ld_s32(s32 x) { return x; }
static inline u32 ld_u16(u16 x) { return x; }
static inline s32 ld_s16(u16 x) { return (int16_t)x; }
static inline s32 ld_s8(u16 x) { return (int8_t)x; }
static inline float st_f32(float x) { return x; }
static inline u16 st_f16(float x) { return f2h(x); }
static inline u32 st_u32(u32 x) { return x; }
static inline s32 st_s32(s32 x) { return x; }
static inline u16 st_u16(u32 x) { return (u16)x; }
static inline u16 st_s16(s32 x) { return (u16)x; }
static inline u16 st_u8(u32 x) { return (u8)x; }
#define mask_f32 w->m32
#define mask_u32 w->m32
#define mask_s32 w->m32
#define mask_f16 w->m16
#define mask_u16 w->m16
#define mask_s16 w->m16
#define mask_u8 w->m16

#define SRC(n, T) const reg_##T *n##p = (const reg_##T *)((char *)w + u->n)
#define LD(n, T) val_##T n = ld_##T(n##p[i])
#define TWICE(name, D, SRCS, LDS, expr) \
  static int full_##name(W *w, const struct uop *u, const void *const *tab) { \
    reg_##D *d = (reg_##D *)((char *)w + u->d); SRCS; \
    VECTOR for (int i = 0; i < WAVE; i++) { LDS; d[i] = st_##D(expr); } \
    GO(u + 1); } \
  static int masked_##name(W *w, const struct uop *u, const void *const *tab) { \
    reg_##D *d = (reg_##D *)((char *)w + u->d); SRCS; \
    VECTOR for (int i = 0; i < WAVE; i++) { LDS; reg_##D v = st_##D(expr); d[i] = mask_##D[i] ? v : d[i]; } \
    GO(u + 1); }
#define LANE1(name, D, A, expr) TWICE(name, D, SRC(a, A), LD(a, A), expr)
#define LANE2(name, D, A, B, expr) TWICE(name, D, SRC(a, A); SRC(b, B), LD(a, A); LD(b, B), expr)
#define LANE3(name, D, A, B, C, expr) TWICE(name, D, SRC(a, A); SRC(b, B); SRC(c, C), LD(a, A); LD(b, B); LD(c, C), expr)

// *** faults

static void report(W *w, u32 kind, u32 pc, u32 lane, u64 addr, u32 size, u32 write) {
  struct run *r = w->run;
  u32 n = __atomic_fetch_add(&r->nfaults, 1, __ATOMIC_RELAXED);
  if (n >= r->max_faults) return;
  r->faults[n] = (struct fault){addr, kind, pc, lane, size, write, {w->wg[0], w->wg[1], w->wg[2]}};
}

// *** execution mask

static inline const void *const *set_exec(W *w, u64 m) {
  w->exec = m;
  if (m == w->live) return full;
  u32 lo = (u32)m, hi = (u32)(m >> 32);
  VECTOR for (u32 i = 0; i < 32; i++) { w->m32[i] = 0u - (lo >> i & 1); w->m32[i + 32] = 0u - (hi >> i & 1); }
  VECTOR for (u32 i = 0; i < WAVE; i++) w->m16[i] = (u16)w->m32[i];
  return masked;
}

static void park(W *w, u32 u, u64 m) {
  u32 n = w->npark;
  for (u32 i = 0; i < n; i++) if (w->park[i].u == u) { w->park[i].m |= m; return; }
  w->park[w->npark++] = (struct park){u, m};
  if (u < w->next) w->next = u;
}

// Every place where fibers wait is an entry of the branch stack. A depth is reported once a wave.
static void deeper(W *w, const struct uop *u) {
  if (LIKELY(w->npark <= w->deepest)) return;
  w->deepest = w->npark;
  report(w, F_BRANCH_STACK, u->pc, (u32)__builtin_ctzll(w->exec | 1ull << 63), w->npark, 0, 0);
}

static u64 unpark(W *w, u32 u) {  // takes the fibers that wait at u
  u64 m = 0;
  u32 next = NONE, n = 0;
  for (u32 i = 0; i < w->npark; i++) {
    if (w->park[i].u == u) { m = w->park[i].m; continue; }
    if (w->park[i].u < next) next = w->park[i].u;
    w->park[n++] = w->park[i];
  }
  w->npark = n, w->next = next;
  return m;
}

// The running fibers continue at u, unless others wait further up.
static u32 go_to(W *w, const struct uop *from, u32 u) {
  if (w->next < u) { park(w, u, w->exec); deeper(w, from); u = w->next; w->exec = unpark(w, u); }
  else if (w->next == u) w->exec |= unpark(w, u);
  return u;
}

// *** control flow. uop.x of a block start is its own index.

H(BB) {  // block start: meets waiting fibers, counts (d = block, imm = instructions)
  if (UNLIKELY(w->next == u->x)) tab = set_exec(w, w->exec | unpark(w, u->x));
  u64 *bb = w->wk->bb + 2 * (u32)u->d;
  bb[0]++, bb[1] += (u64)__builtin_popcountll(w->exec);
  if (UNLIKELY((w->budget -= u->imm) < 0)) {
    report(w, F_HANG, u->pc, (u32)__builtin_ctzll(w->exec | 1ull << 63), 0, 0, 0);
    w->run->hang = 1, *w->run->abort = 1;
    return RET_STOP;
  }
  GO(u + 1);
}

H(JUMP) {  // d = target
  if (UNLIKELY((u32)u->d <= u->x && *w->run->abort)) return RET_STOP;
  if (UNLIKELY(w->npark)) { u32 t = go_to(w, u, (u32)u->d); tab = set_exec(w, w->exec); GO(w->base + t); }
  GO(w->base + u->d);
}

static const struct uop *diverge(W *w, const struct uop *u, u64 taken) {
  u32 t = (u32)u->d, fall = u->x + 1;
  u64 e = w->exec, stay = e & ~taken;
  if (!stay) t = go_to(w, u, t);
  else if (!taken) t = go_to(w, u, fall);
  else if (t > fall) { park(w, t, taken); deeper(w, u); w->exec = stay; t = go_to(w, u, fall); }
  else { park(w, fall, stay); deeper(w, u); w->exec = taken; t = go_to(w, u, t); }
  return w->base + t;
}

// aux: 1:0 first component, 2 its inversion, 4:3 second component, 5 its inversion, 10:8 branch type
H(BR) {
  if (UNLIKELY((u32)u->d <= u->x && *w->run->abort)) return RET_STOP;
  u64 e = w->exec, c1 = w->p[u->aux & 3] ^ (u->aux & 4 ? ~0ull : 0), c2 = w->p[u->aux >> 3 & 3] ^ (u->aux & 32 ? ~0ull : 0), t;
  switch (u->aux >> 8) {
    case 0: t = c1; break;
    case 1: t = c1 | c2; break;
    case 2: t = c1 & c2; break;
    case 3: t = w->run->cf_mask >> u->c & 1 ? ~0ull : 0; break;
    case 4: t = c1 & e ? ~0ull : 0; break;
    default: t = (c1 & e) == e ? ~0ull : 0; break;
  }
  t &= e;
  if (LIKELY(!w->npark)) {
    if (t == e) GO(w->base + u->d);
    if (!t) GO(u + 1);
  }
  const struct uop *n = diverge(w, u, t);
  tab = set_exec(w, w->exec);
  GO(n);
}

H(GETONE) {  // one fiber takes the branch
  const struct uop *n = diverge(w, u, w->exec & -w->exec);
  tab = set_exec(w, w->exec);
  GO(n);
}

H(GETLAST) {  // the first cluster of 8 that has active fibers, but for its last active one
  u64 first = w->exec & (0xffull << ((u32)__builtin_ctzll(w->exec) & ~7u)), last = 1ull << (63 - __builtin_clzll(first));
  const struct uop *n = diverge(w, u, first & ~last);
  tab = set_exec(w, w->exec);
  GO(n);
}

H(CALL) {
  for (u64 e = w->exec; e; e &= e - 1) {
    u32 i = (u32)__builtin_ctzll(e);
    if (w->sp[i] == CALL_DEPTH) { report(w, F_STACK, u->pc, i, 0, 0, 0); *w->run->abort = 1; return RET_STOP; }
    w->ret[w->sp[i]++][i] = u->x + 1;
  }
  const struct uop *n = diverge(w, u, w->exec);
  tab = set_exec(w, w->exec);
  GO(n);
}

H(RET) {
  u64 e = w->exec;
  u32 to = NONE;
  for (u64 m = e; m; m &= m - 1) {
    u32 i = (u32)__builtin_ctzll(m);
    if (!w->sp[i]) { report(w, F_STACK, u->pc, i, 0, 0, 0); *w->run->abort = 1; return RET_STOP; }
    u32 t = w->ret[--w->sp[i]][i];
    park(w, t, 1ull << i);
    if (t < to) to = t;
  }
  w->exec = unpark(w, to = w->next);
  tab = set_exec(w, w->exec);
  GO(w->base + to);
}

H(END) {
  w->live &= ~w->exec;
  if (!w->npark) return RET_END;
  u32 t = w->next;
  tab = set_exec(w, unpark(w, t));
  GO(w->base + t);
}

H(FETCH) {  // ran past the last instruction
  report(w, F_FETCH_PAST_END, u->pc, (u32)__builtin_ctzll(w->exec), 0, 8, 0);
  *w->run->abort = 1;
  return RET_STOP;
}

H(PREDT) {  // aux as BR; d = where to go when no fiber is left
  w->pred_outer = w->exec;
  w->pred_bits = w->p[u->aux & 3] ^ (u->aux & 4 ? ~0ull : 0);
  u64 m = w->exec & w->pred_bits;
  if (!m) { w->exec = 0; GO(w->base + u->d); }
  tab = set_exec(w, m);
  GO(u + 1);
}
H(PREDF) {
  u64 m = w->pred_outer & ~w->pred_bits;
  if (!m) { w->exec = 0; GO(w->base + u->d); }
  tab = set_exec(w, m);
  GO(u + 1);
}
H(PREDE) { tab = set_exec(w, w->pred_outer); GO(u + 1); }

H(BAR) {
  if (UNLIKELY(w->exec != w->live)) report(w, F_BARRIER_DIVERGENCE, u->pc, (u32)__builtin_ctzll(w->live & ~w->exec), 0, 0, 0);
  w->resume = u + 1;
  return RET_BAR;
}

// *** predicates, address register, shared registers

#define PSET(name, T, V) H(name) { /* p0.aux = source is not zero, in active fibers */ \
    const T *a = V(u->a); u64 m = 0; PACK(a, T) \
    w->p[u->aux] = (w->p[u->aux] & ~w->exec) | (m & w->exec); GO(u + 1); }
#if defined(__AVX2__)
static inline u64 pack_u32(const u32 *a) {
  u64 m = 0;
  for (int i = 0; i < 8; i++) {
    __m256i z = _mm256_cmpeq_epi32(_mm256_load_si256((const __m256i *)a + i), _mm256_setzero_si256());
    m |= (u64)(u8)~_mm256_movemask_ps(_mm256_castsi256_ps(z)) << (8 * i);
  }
  return m;
}
static inline u64 pack_u16(const u16 *a) {
  u64 m = 0;
  for (int i = 0; i < 2; i++) {
    __m256i z0 = _mm256_cmpeq_epi16(_mm256_load_si256((const __m256i *)a + 2 * i), _mm256_setzero_si256());
    __m256i z1 = _mm256_cmpeq_epi16(_mm256_load_si256((const __m256i *)a + 2 * i + 1), _mm256_setzero_si256());
    __m256i z = _mm256_permute4x64_epi64(_mm256_packs_epi16(z0, z1), 0xd8);
    m |= (u64)~(u32)_mm256_movemask_epi8(z) << (32 * i);
  }
  return m;
}
#else
static inline u64 pack_u32(const u32 *a) { u64 m = 0; for (int i = 0; i < WAVE; i++) m |= (u64)(a[i] != 0) << i; return m; }
static inline u64 pack_u16(const u16 *a) { u64 m = 0; for (int i = 0; i < WAVE; i++) m |= (u64)(a[i] != 0) << i; return m; }
#endif
#define PACK(a, T) m = pack_##T(a);
PSET(PSET32, u32, V32)
PSET(PSET16, u16, V16)
H(PGET32) { u64 m = w->p[u->aux]; u32 *d = V32(u->d); for (int i = 0; i < WAVE; i++) d[i] = m >> i & 1; GO(u + 1); }
H(PGET16) { u64 m = w->p[u->aux]; u16 *d = V16(u->d); for (int i = 0; i < WAVE; i++) d[i] = m >> i & 1; GO(u + 1); }

// Relative access through a0.x (u16 vector at b): a/d = vector of register 0, imm = offset, c = number of registers that exist.
#define REL(T, V, SIZE) \
  H(RELG##SIZE) { T *d = V(u->d); const u16 *a0 = V16(u->b); \
    for (u64 e = w->exec; e; e &= e - 1) { u32 i = (u32)__builtin_ctzll(e); s32 k = (int16_t)a0[i] + u->imm; \
      if ((u32)k >= (u32)u->c) { report(w, F_OUT_OF_BOUNDS, u->pc, i, (u64)(s64)k, SIZE / 8, 0); d[i] = 0; continue; } \
      d[i] = V(u->a + k * (WAVE * SIZE / 8))[i]; } \
    GO(u + 1); } \
  H(RELD##SIZE) { const T *s = V(u->a); const u16 *a0 = V16(u->b); \
    for (u64 e = w->exec; e; e &= e - 1) { u32 i = (u32)__builtin_ctzll(e); s32 k = (int16_t)a0[i] + u->imm; \
      if ((u32)k >= (u32)u->c) { report(w, F_OUT_OF_BOUNDS, u->pc, i, (u64)(s64)k, SIZE / 8, 1); continue; } \
      V(u->d + k * (WAVE * SIZE / 8))[i] = s[i]; } \
    GO(u + 1); }
REL(u32, V32, 32)
REL(u16, V16, 16)
H(RELGM) {  // the same of a half of merged registers, counted in halves
  u16 *d = V16(u->d); const u16 *a0 = V16(u->b);
  for (u64 e = w->exec; e; e &= e - 1) {
    u32 i = (u32)__builtin_ctzll(e); s32 k = (int16_t)a0[i] + u->imm;
    if ((u32)k >= (u32)u->c) { report(w, F_OUT_OF_BOUNDS, u->pc, i, (u64)(s64)k, 2, 0); d[i] = 0; continue; }
    d[i] = (u16)(V32(u->a + (k >> 1) * (WAVE * 4))[i] >> 16 * (k & 1));
  }
  GO(u + 1);
}
H(RELDM) {
  const u16 *s = V16(u->a), *a0 = V16(u->b);
  for (u64 e = w->exec; e; e &= e - 1) {
    u32 i = (u32)__builtin_ctzll(e); s32 k = (int16_t)a0[i] + u->imm;
    if ((u32)k >= (u32)u->c) { report(w, F_OUT_OF_BOUNDS, u->pc, i, (u64)(s64)k, 2, 1); continue; }
    memcpy((u16 *)&V32(u->d + (k >> 1) * (WAVE * 4))[i] + (k & 1), &s[i], 2);
  }
  GO(u + 1);
}
H(RELC) {  // relative constant into a u32 or (aux 1: low bits, 2: narrowed float) u16 vector
  const u16 *a0 = V16(u->b);
  for (u64 e = w->exec; e; e &= e - 1) {
    u32 i = (u32)__builtin_ctzll(e), v = 0;
    s32 k = (int16_t)a0[i] + u->imm;
    if ((u32)k >= 1024) report(w, F_OUT_OF_BOUNDS, u->pc, i, (u64)(s64)k, 4, 0);
    else v = w->wk->consts[k];
    if (u->aux == 0) V32(u->d)[i] = v;
    else V16(u->d)[i] = u->aux == 1 ? (u16)v : f2h(bitsf(v));
  }
  GO(u + 1);
}
H(CONST) {  // a constant that the program may have written itself; imm = its id, aux as RELC
  u32 v = w->wk->consts[u->imm];
  if (u->aux == 0) { u32 *d = V32(u->d); VECTOR for (int i = 0; i < WAVE; i++) d[i] = v; }
  else { u16 *d = V16(u->d), h = u->aux == 1 ? (u16)v : f2h(bitsf(v)); VECTOR for (int i = 0; i < WAVE; i++) d[i] = h; }
  GO(u + 1);
}
H(BCAST32) {  // shared registers hold one value a wave: the first active fiber's
  u32 *d = V32(u->d), v = V32(u->a)[__builtin_ctzll(w->exec | 1ull << 63)];
  for (int i = 0; i < WAVE; i++) d[i] = v;
  GO(u + 1);
}
H(MOVMSK) {  // aux registers of 32 mask bits each
  for (u32 k = 0; k < u->aux; k++)
    for (u64 e = w->exec; e; e &= e - 1) V32(u->d)[k * WAVE + (u32)__builtin_ctzll(e)] = (u32)(w->exec >> (32 * k));
  GO(u + 1);
}

// Data of other fibers. What comes from a fiber that is not active is nothing in particular: the pattern of undefined registers.
#define FIBERS(SIZE, T, V) \
  H(SHFL##SIZE) { /* a -> d; aux = mode, b = vector of the index, 0: imm is the index */ \
    T *d = V(u->d), v[WAVE]; u64 e = w->exec; u32 n = u->b ? V32(u->b)[__builtin_ctzll(e | 1ull << 63)] : (u32)u->imm; \
    memcpy(v, V(u->a), sizeof(v)); \
    for (u64 m = e; m; m &= m - 1) { u32 i = (u32)__builtin_ctzll(m), j; \
      switch (u->aux) { case 1: j = i ^ n; break; case 2: j = i - n; break; case 3: j = i + n; break; case 6: j = (i - n) & 63; break; \
        default: j = (i + n) & 63; } \
      d[i] = j < WAVE && e >> j & 1 ? v[j] : (T)0xffa5ffa5u; } \
    GO(u + 1); } \
  H(BRCST##SIZE) { /* aux = cluster size */ \
    T *d = V(u->d); const T *a = V(u->a); u64 e = w->exec; u32 n = u->aux; \
    for (u32 c = 0; c < WAVE; c += n) { u64 low = e & (((1ull << n / 2) - 1) << c); if (!low) continue; \
      T v = a[63 - __builtin_clzll(low)]; for (u32 i = c + n / 2; i < c + n; i++) if (e >> i & 1) d[i] = v; } \
    GO(u + 1); } \
  H(QUAD##SIZE) { /* aux: 0 = fiber b of the quad, else i ^ aux */ \
    T *d = V(u->d), v[WAVE]; u64 e = w->exec; memcpy(v, V(u->a), sizeof(v)); \
    for (u64 m = e; m; m &= m - 1) { u32 i = (u32)__builtin_ctzll(m), j = u->aux ? i ^ u->aux : (i & ~3u) | ((u32)V(u->b)[i] & 3); \
      d[i] = e >> j & 1 ? v[j] : (T)0xffa5ffa5u; } \
    GO(u + 1); }
FIBERS(32, u32, V32)
FIBERS(16, u16, V16)

// *** definedness of registers: one 64-bit lane mask each, only for registers the translator could not prove

#define DEF(o) (*(u64 *)((char *)w + (o)))
H(DEFINE) { DEF(u->d) |= w->exec; GO(u + 1); }
H(DEFCOPY) { DEF(u->d) = (DEF(u->d) & ~w->exec) | (DEF(u->a) & w->exec); GO(u + 1); }
H(CHECK) {  // aux: half, imm: register id
  u64 bad = w->exec & ~DEF(u->a);
  if (UNLIKELY(bad)) { report(w, F_UNDEFINED_REGISTER, u->pc, (u32)__builtin_ctzll(bad), (u64)(u32)u->imm, u->aux ? 2 : 4, 0); DEF(u->a) |= bad; }
  GO(u + 1);
}

// *** global memory

static const struct seg *find_seg(W *w, u64 addr) {
  const struct seg *s = w->hit;
  if (LIKELY(s && addr - s->iova < s->size)) return s;
  u32 lo = 0, hi = w->run->nsegs;
  while (lo < hi) { u32 m = (lo + hi) / 2; if (w->run->segs[m].iova <= addr) lo = m + 1; else hi = m; }
  if (!lo) return NULL;
  s = &w->run->segs[lo - 1];
  return addr - s->iova < s->size ? (w->hit = s) : NULL;
}

static u32 uche_lock;
static void fill_line(const struct seg *s, u64 line) {
  while (__atomic_exchange_n(&uche_lock, 1, __ATOMIC_ACQUIRE)) while (__atomic_load_n(&uche_lock, __ATOMIC_RELAXED));
  if (!(s->line[line] & LINE_VALID)) {
    u64 o = line * 64, n = s->size - o < 64 ? s->size - o : 64;
    memcpy(s->cache + o, s->ram + o, n);
    __atomic_store_n(&s->line[line], s->line[line] | LINE_VALID, __ATOMIC_RELEASE);
  }
  __atomic_store_n(&uche_lock, 0, __ATOMIC_RELEASE);
}

// Makes [off, off+n) readable through UCHE (write: and dirty).
static inline void touch(W *w, const struct uop *u, u32 lane, const struct seg *s, u64 off, u64 n, int write) {
  for (u64 l = off >> 6; l <= (off + n - 1) >> 6; l++) {
    u8 b = __atomic_load_n(&s->line[l], __ATOMIC_ACQUIRE);
    if (UNLIKELY(!(b & LINE_VALID))) { fill_line(s, l); b = s->line[l]; }
    if (write) { if (!(b & LINE_DIRTY)) s->line[l] = b | LINE_DIRTY; }
    else if (UNLIKELY(b & (LINE_STALE | LINE_UNSETTLED))) report(w, b & LINE_STALE ? F_STALE : F_UNSETTLED, u->pc, lane, s->iova + l * 64, 64, 0);
  }
}

static u32 access_fault(const struct seg *s, int write) {
  if (!s) return F_UNMAPPED;
  if (!(s->flags & SEG_RESIDENT)) return F_NOT_RESIDENT;
  return write && !(s->flags & SEG_WRITE) ? F_READONLY : NONE;
}

// Host address of [addr, addr+n) or NULL after a report. One lane, the slow way.
static u8 *translate(W *w, const struct uop *u, u32 lane, u64 addr, u32 n, int write) {
  const struct seg *s = find_seg(w, addr);
  u32 bad = access_fault(s, write);
  if (UNLIKELY(bad != NONE)) { report(w, bad, u->pc, lane, addr, n, (u32)write); return NULL; }
  if (UNLIKELY(addr - s->iova + n > s->size)) { report(w, F_UNMAPPED, u->pc, lane, addr, n, (u32)write); return NULL; }
  if (!s->cache) return s->ram + (addr - s->iova);
  touch(w, u, lane, s, addr - s->iova, n, write);
  return s->cache + (addr - s->iova);
}

struct scan { u64 addr[WAVE] __attribute__((aligned(64))); u64 lo, hi; const struct seg *seg; u8 *base; u32 lanes; int contiguous, uniform; };

// Addresses of the active fibers, and the one segment that holds them all, if there is one and nothing is wrong with the access.
static inline void scan_addresses(W *w, const struct uop *u, struct scan *s, u32 bytes, u32 align, int write) {
  const u32 *alo = V32(u->a), *ahi = V32(u->b);
  u64 e = w->exec;
  u32 f = (u32)__builtin_ctzll(e), full_lanes = e == ~0ull ? WAVE : (e & (e + 1)) == 0 ? (u32)__builtin_popcountll(e) : 0;
  u64 first = ((u64)ahi[f] << 32 | alo[f]) + (u64)(s64)u->imm, odd = 0, step = 0, same = 0;
  s64 lo = (s64)first, hi = (s64)first;
  if (LIKELY(e == ~0ull)) {
    VECTOR for (u32 i = 0; i < WAVE; i++) s->addr[i] = ((u64)ahi[i] << 32 | alo[i]) + (u64)(s64)u->imm;
    VECTOR for (u32 i = 0; i < WAVE; i++) {
      s64 x = (s64)s->addr[i];
      odd |= (u64)x, step |= (u64)x ^ (first + (u64)i * bytes), same |= (u64)x ^ first;
      lo = x < lo ? x : lo, hi = x > hi ? x : hi;
    }
  } else {
    for (u64 m = e; m; m &= m - 1) {
      u32 i = (u32)__builtin_ctzll(m);
      u64 a = ((u64)ahi[i] << 32 | alo[i]) + (u64)(s64)u->imm;
      s64 x = (s64)a;
      s->addr[i] = a;
      odd |= a, same |= a ^ first, step |= i < full_lanes ? a ^ (first + (u64)i * bytes) : 0;
      lo = x < lo ? x : lo, hi = x > hi ? x : hi;
    }
  }
  s->lo = (u64)lo, s->hi = (u64)hi + bytes;
  s->lanes = full_lanes, s->contiguous = full_lanes && !step, s->uniform = !same;
  s->seg = NULL;
  if (UNLIKELY(odd & (align - 1))) return;
  const struct seg *g = find_seg(w, (u64)lo);
  if (UNLIKELY(access_fault(g, write) != NONE) || UNLIKELY((u64)hi - g->iova + bytes > g->size)) return;
  s->seg = g;
  s->base = g->cache ? g->cache : g->ram;
}

#define LDG(SZ, MT, RT, V) H(LDG##SZ) { /* d = first register, a/b = address, imm = offset in bytes, aux = components */ \
    u32 n = u->aux, bytes = n * SZ; struct scan s; u64 e = w->exec; \
    if (UNLIKELY(!e)) GO(u + 1); \
    scan_addresses(w, u, &s, bytes, SZ, 0); \
    w->wk->bytes_read += (u64)__builtin_popcountll(e) * bytes; \
    if (LIKELY(s.seg != NULL)) { \
      const struct seg *g = s.seg; u64 iova = g->iova; \
      if (s.contiguous) { \
        const u8 *p = s.base + (s.addr[0] - iova); \
        if (g->cache) touch(w, u, 0, g, s.addr[0] - iova, (u64)s.lanes * bytes, 0); \
        if (n == 1) { RT *d = V(u->d); const MT *q = (const MT *)p; \
          if (s.lanes == WAVE) { VECTOR for (u32 i = 0; i < WAVE; i++) d[i] = q[i]; } else for (u32 i = 0; i < s.lanes; i++) d[i] = q[i]; \
        } else if (n == 4 && s.lanes == WAVE) { RT *d0 = V(u->d), *d1 = d0 + WAVE, *d2 = d1 + WAVE, *d3 = d2 + WAVE; const MT *q = (const MT *)p; \
          VECTOR for (u32 i = 0; i < WAVE; i++) { d0[i] = q[4 * i]; d1[i] = q[4 * i + 1]; d2[i] = q[4 * i + 2]; d3[i] = q[4 * i + 3]; } \
        } else for (u32 c = 0; c < n; c++) { RT *d = V(u->d) + c * WAVE; for (u32 i = 0; i < s.lanes; i++) d[i] = ((const MT *)p)[i * n + c]; } \
      } else if (s.uniform && e == w->live) { \
        const MT *p = (const MT *)(s.base + (s.lo - iova)); \
        if (g->cache) touch(w, u, (u32)__builtin_ctzll(e), g, s.lo - iova, bytes, 0); \
        for (u32 c = 0; c < n; c++) { RT *d = V(u->d) + c * WAVE, v = p[c]; VECTOR for (u32 i = 0; i < WAVE; i++) d[i] = v; } \
      } else { \
        if (g->cache) for (u64 m = e; m; m &= m - 1) { u32 i = (u32)__builtin_ctzll(m); touch(w, u, i, g, s.addr[i] - iova, bytes, 0); } \
        const u8 *base = s.base - iova; RT *d = V(u->d); \
        if (n == 4) for (u64 m = e; m; m &= m - 1) { u32 i = (u32)__builtin_ctzll(m); const MT *p = (const MT *)(base + s.addr[i]); \
          d[i] = p[0]; d[i + WAVE] = p[1]; d[i + 2 * WAVE] = p[2]; d[i + 3 * WAVE] = p[3]; } \
        else for (u64 m = e; m; m &= m - 1) { u32 i = (u32)__builtin_ctzll(m); const MT *p = (const MT *)(base + s.addr[i]); \
          for (u32 c = 0; c < n; c++) d[i + c * WAVE] = p[c]; } \
      } \
    } else for (u64 m = e; m; m &= m - 1) { \
      u32 i = (u32)__builtin_ctzll(m); const MT *p = NULL; u64 addr = s.addr[i]; \
      if (addr & (SZ - 1)) report(w, F_MISALIGNED, u->pc, i, addr, bytes, 0); \
      else p = (const MT *)translate(w, u, i, addr, bytes, 0); \
      for (u32 c = 0; c < n; c++) (V(u->d) + c * WAVE)[i] = p ? p[c] : 0; \
    } \
    GO(u + 1); }
LDG(1, u8, u16, V16)
LDG(2, u16, u16, V16)
LDG(4, u32, u32, V32)

#define STG(SZ, MT, RT, V) H(STG##SZ) { /* d = first data register, rest as LDG */ \
    u32 n = u->aux, bytes = n * SZ; struct scan s; u64 e = w->exec; \
    if (UNLIKELY(!e)) GO(u + 1); \
    scan_addresses(w, u, &s, bytes, SZ, 1); \
    w->wk->bytes_written += (u64)__builtin_popcountll(e) * bytes; \
    const RT *d = V(u->d); \
    if (LIKELY(s.seg != NULL)) { \
      const struct seg *g = s.seg; u64 iova = g->iova; \
      if (s.contiguous) { \
        MT *p = (MT *)(s.base + (s.addr[0] - iova)); \
        if (g->cache) touch(w, u, 0, g, s.addr[0] - iova, (u64)s.lanes * bytes, 1); \
        if (n == 1 && s.lanes == WAVE) { VECTOR for (u32 i = 0; i < WAVE; i++) p[i] = (MT)d[i]; } \
        else for (u32 i = 0; i < s.lanes; i++) for (u32 c = 0; c < n; c++) p[i * n + c] = (MT)d[i + c * WAVE]; \
      } else { \
        u8 *base = s.base - iova; \
        for (u64 m = e; m; m &= m - 1) { \
          u32 i = (u32)__builtin_ctzll(m); MT *p = (MT *)(base + s.addr[i]); \
          if (g->cache) touch(w, u, i, g, s.addr[i] - iova, bytes, 1); \
          for (u32 c = 0; c < n; c++) p[c] = (MT)d[i + c * WAVE]; } \
      } \
    } else for (u64 m = e; m; m &= m - 1) { \
      u32 i = (u32)__builtin_ctzll(m); u64 addr = s.addr[i]; \
      if (addr & (SZ - 1)) { report(w, F_MISALIGNED, u->pc, i, addr, bytes, 1); continue; } \
      MT *p = (MT *)translate(w, u, i, addr, bytes, 1); \
      if (p) for (u32 c = 0; c < n; c++) p[c] = (MT)d[i + c * WAVE]; \
    } \
    GO(u + 1); }
STG(1, u8, u16, V16)
STG(2, u16, u16, V16)
STG(4, u32, u32, V32)

H(ADDRA) {  // address of ldg.a and stg.a: d/b = low/high words out, a = base, c = index, aux = shift | offset << 4 | log2(size) << 8
  u32 *lo = V32(u->d), *hi = V32(u->b); const u32 *a = V32(u->a), *c = V32(u->c);
  u32 sh = u->aux & 15, off = u->aux >> 4 & 15, ts = u->aux >> 8;
  VECTOR for (int i = 0; i < WAVE; i++) {
    u64 x = ((u64)a[i + WAVE] << 32 | a[i]) + ((((u64)c[i] << sh) + off) << ts);
    lo[i] = (u32)x, hi[i] = (u32)(x >> 32);
  }
  GO(u + 1);
}

static void set_consts(W *w, const struct uop *u, s64 at, const u32 *v, u32 n) {
  if (at < 0 || at + n > 1024) { report(w, F_OUT_OF_BOUNDS, u->pc, (u32)__builtin_ctzll(w->exec | 1ull << 63), (u64)at, 4 * n, 1); return; }
  memcpy(w->wk->consts + at, v, 4 * n);
}
static s64 const_at(W *w, const struct uop *u) {  // imm, plus a1.x of the first active fiber if there is a vector b
  return u->imm + (u->b ? (s64)V16(u->b)[__builtin_ctzll(w->exec | 1ull << 63)] : 0);
}
H(STC) {  // a = first register, aux = components; the first active fiber's values
  u32 v[4];
  for (u32 k = 0; k < u->aux; k++) v[k] = V32(u->a)[k * WAVE + (u32)__builtin_ctzll(w->exec | 1ull << 63)];
  if (w->exec) set_consts(w, u, const_at(w, u), v, u->aux);
  GO(u + 1);
}
H(LDGK) {  // a/c = address, d = its offset in bytes, aux = dwords
  u32 f = (u32)__builtin_ctzll(w->exec | 1ull << 63), v[16];
  u64 addr = ((u64)V32(u->c)[f] << 32 | V32(u->a)[f]) + (u64)(s64)u->d;
  if (!w->exec) GO(u + 1);
  const u8 *p = addr & 3 ? NULL : translate(w, u, f, addr, 4 * u->aux, 0);
  if (addr & 3) report(w, F_MISALIGNED, u->pc, f, addr, 4 * u->aux, 0);
  if (p) memcpy(v, p, 4 * u->aux); else memset(v, 0, sizeof(v));
  w->wk->bytes_read += 4 * u->aux;
  set_consts(w, u, const_at(w, u), v, u->aux);
  GO(u + 1);
}

// A descriptor by slot: c = its number, or (indirect) the vector that holds it for each fiber. NULL after a report.
static const struct image *descriptor(W *w, const struct uop *u, u32 lane, u32 slot, const struct image *t, u32 n, int write) {
  if (LIKELY(slot < n && t[slot].kind)) return &t[slot];
  report(w, F_OUT_OF_BOUNDS, u->pc, lane, slot, 0, (u32)write);
  return NULL;
}

H(LDC) {  // d = first register, a = vector of the offset (0: imm), c = slot; aux = components | first component << 4 | indirect << 8 | ldc.k << 9
  u32 n = u->aux & 15, first = u->aux >> 4 & 15;
  if (u->aux >> 9) {  // copies x vec4 to the constant file at a1.x (vector b)
    u32 f = (u32)__builtin_ctzll(w->exec | 1ull << 63), off = u->a ? V32(u->a)[f] : (u32)u->imm;
    if (!w->exec) GO(u + 1);
    const struct image *t = descriptor(w, u, f, u->aux >> 8 & 1 ? V32(u->c)[f] : (u32)u->c, w->run->ubo, w->run->nubo, 0);
    for (u32 k = 0; t && k < (u32)u->d; k++) {
      u32 v[4] = {0, 0, 0, 0};
      const u8 *p = off + k < t->width ? translate(w, u, f, t->base + 16ull * (off + k), 16, 0) : NULL;
      if (p) memcpy(v, p, 16);
      set_consts(w, u, (s64)V16(u->b)[f] + 4 * k, v, 4);
    }
    GO(u + 1);
  }
  for (u64 m = w->exec; m; m &= m - 1) {
    u32 i = (u32)__builtin_ctzll(m), off = u->a ? V32(u->a)[i] : (u32)u->imm, v[8] = {0};
    const struct image *t = descriptor(w, u, i, u->aux >> 8 & 1 ? V32(u->c)[i] : (u32)u->c, w->run->ubo, w->run->nubo, 0);
    for (u32 k = 0; t && 4 * k < first + n; k++) {
      const u8 *p = off + k < t->width ? translate(w, u, i, t->base + 16ull * (off + k), 16, 0) : NULL;
      if (p) memcpy(v + 4 * k, p, 16);
    }
    w->wk->bytes_read += 4 * n;
    for (u32 k = 0; k < n; k++) V32(u->d)[k * WAVE + i] = v[first + k];
  }
  GO(u + 1);
}

// *** atomics: d = old value, b = data (cmpxchg: data, then the value to compare with), aux = operation (isa.ATOMICS) | signed << 8

static u32 atomic_on(u32 *p, u32 op, int sign, u32 v, u32 cmp) {
  u32 old = __atomic_load_n(p, __ATOMIC_RELAXED), new;
  do {
    switch (op) {
      case 16: new = old + v; break;
      case 17: new = old - v; break;
      case 18: new = v; break;
      case 21: new = old == cmp ? v : old; break;
      case 22: new = sign ? ((s32)old < (s32)v ? old : v) : old < v ? old : v; break;
      case 23: new = sign ? ((s32)old > (s32)v ? old : v) : old > v ? old : v; break;
      case 24: new = old & v; break;
      case 25: new = old | v; break;
      default: new = old ^ v; break;
    }
  } while (!__atomic_compare_exchange_n(p, &old, new, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
H(ATOMG) {  // a/c = address
  for (u64 m = w->exec; m; m &= m - 1) {
    u32 i = (u32)__builtin_ctzll(m); u64 addr = (u64)V32(u->c)[i] << 32 | V32(u->a)[i]; u8 *p = NULL;
    if (addr & 3) report(w, F_MISALIGNED, u->pc, i, addr, 4, 1);
    else p = translate(w, u, i, addr, 4, 1);
    w->wk->bytes_read += 4, w->wk->bytes_written += 4;
    V32(u->d)[i] = p ? atomic_on((u32 *)p, u->aux & 255, u->aux >> 8, V32(u->b)[i], V32(u->b)[i + WAVE * ((u->aux & 255) == 21)]) : 0;
  }
  GO(u + 1);
}
H(ATOML) {  // a = byte address in local memory
  worker *k = w->wk;
  for (u64 m = w->exec; m; m &= m - 1) {
    u32 i = (u32)__builtin_ctzll(m), old = 0; u64 o = V32(u->a)[i];
    if (o + 4 > w->run->local_bytes) report(w, F_LOCAL_OUT_OF_BOUNDS, u->pc, i, o, 4, 1);
    else if (o & 3) report(w, F_MISALIGNED, u->pc, i, o, 4, 1);
    else {
      if (k->local_def && (u->aux & 255) != 18) for (u32 b = 0; b < 4; b++) if (!k->local_def[o + b]) {
        report(w, F_UNDEFINED_LOCAL, u->pc, i, o + b, 4, 0); break; }
      if (k->local_def) memset(k->local_def + o, 1, 4);
      old = atomic_on((u32 *)(k->local + o), u->aux & 255, u->aux >> 8, V32(u->b)[i], V32(u->b)[i + WAVE * ((u->aux & 255) == 21)]);
    }
    V32(u->d)[i] = old;
  }
  GO(u + 1);
}

// *** local memory: byte address = 32-bit register a + imm

#define LDL(SZ, MT, RT, V) H(LDL##SZ) { \
    u32 n = u->aux, bytes = n * SZ, size = w->run->local_bytes; const u32 *a = V32(u->a); worker *k = w->wk; \
    for (u64 m = w->exec; m; m &= m - 1) { \
      u32 i = (u32)__builtin_ctzll(m); u64 o = (u64)a[i] + (u64)(s64)u->imm; const MT *p = (const MT *)(k->local + o); RT *d = V(u->d) + i; \
      if (UNLIKELY(o + bytes > size || o > size)) { report(w, F_LOCAL_OUT_OF_BOUNDS, u->pc, i, o, bytes, 0); p = NULL; } \
      else if (UNLIKELY(o & (SZ - 1))) { report(w, F_MISALIGNED, u->pc, i, o, bytes, 0); p = NULL; } \
      else if (k->local_def) for (u32 b = 0; b < bytes; b++) if (UNLIKELY(!k->local_def[o + b])) { \
        report(w, F_UNDEFINED_LOCAL, u->pc, i, o + b, bytes, 0); k->local_def[o + b] = 1; break; } \
      for (u32 c = 0; c < n; c++) d[c * WAVE] = p ? p[c] : 0; } \
    GO(u + 1); } \
  H(STL##SZ) { \
    u32 n = u->aux, bytes = n * SZ, size = w->run->local_bytes; const u32 *a = V32(u->a); worker *k = w->wk; \
    for (u64 m = w->exec; m; m &= m - 1) { \
      u32 i = (u32)__builtin_ctzll(m); u64 o = (u64)a[i] + (u64)(s64)u->imm; MT *p = (MT *)(k->local + o); const RT *d = V(u->d) + i; \
      if (UNLIKELY(o + bytes > size || o > size)) { report(w, F_LOCAL_OUT_OF_BOUNDS, u->pc, i, o, bytes, 1); continue; } \
      if (UNLIKELY(o & (SZ - 1))) { report(w, F_MISALIGNED, u->pc, i, o, bytes, 1); continue; } \
      for (u32 c = 0; c < n; c++) p[c] = (MT)d[c * WAVE]; \
      if (k->local_def) memset(k->local_def + o, 1, bytes); } \
    GO(u + 1); }
LDL(1, u8, u16, V16)
LDL(2, u16, u16, V16)
LDL(4, u32, u32, V32)

// *** private memory: word `o / 4` of fiber i lies at word[(o / 4) * 64 + i]; what a fiber can see is the same in either hardware layout

// Offset of all fibers, if the wave is whole and they agree on an aligned one inside; NONE otherwise.
static inline u32 same_offset(W *w, const struct uop *u, const u32 *a, u32 bytes) {
  u32 odd = 0; u64 o = (u64)a[0] + (u64)(s64)u->imm;
  if (w->exec != ~0ull || (o & 3) || o > w->run->pvt_bytes || o + bytes > w->run->pvt_bytes) return NONE;
  VECTOR for (int i = 0; i < WAVE; i++) odd |= a[i] ^ a[0];
  return odd ? NONE : (u32)o;
}
static void private_stored(W *w, u64 o, u32 bytes, u64 m) { for (u32 b = 0; w->pvt_def && b < bytes; b++) w->pvt_def[o + b] |= m; }
static void private_loaded(W *w, const struct uop *u, u64 o, u32 bytes, u64 m) {
  for (u32 b = 0; w->pvt_def && b < bytes; b++) {
    u64 bad = m & ~w->pvt_def[o + b];
    if (LIKELY(!bad)) continue;
    report(w, F_UNDEFINED_PRIVATE, u->pc, (u32)__builtin_ctzll(bad), o + b, bytes, 0);
    private_stored(w, o, bytes, m);
    return;
  }
}
#define LDP(SZ, MT, RT, V) H(LDP##SZ) { \
    u32 n = u->aux, bytes = n * SZ, size = w->run->pvt_bytes, all = SZ == 4 ? same_offset(w, u, V32(u->a), bytes) : NONE; \
    const u32 *a = V32(u->a); \
    if (all != NONE) { private_loaded(w, u, all, bytes, ~0ull); memcpy(V(u->d), w->pvt + (u64)all * WAVE, (u64)bytes * WAVE); GO(u + 1); } \
    for (u64 m = w->exec; m; m &= m - 1) { \
      u32 i = (u32)__builtin_ctzll(m), bad = 0; u64 o = (u64)a[i] + (u64)(s64)u->imm; RT *d = V(u->d) + i; \
      if (UNLIKELY(o + bytes > size || o > size)) { report(w, F_PRIVATE_OUT_OF_BOUNDS, u->pc, i, o, bytes, 0); bad = 1; } \
      else if (UNLIKELY(o & (SZ - 1))) { report(w, F_MISALIGNED, u->pc, i, o, bytes, 0); bad = 1; } \
      else private_loaded(w, u, o, bytes, m & -m); \
      for (u32 c = 0; c < n; c++) { u64 q = o + c * SZ; d[c * WAVE] = bad ? 0 : *(const MT *)(w->pvt + (q / 4 * WAVE + i) * 4 + (q & 3)); } } \
    GO(u + 1); } \
  H(STP##SZ) { \
    u32 n = u->aux, bytes = n * SZ, size = w->run->pvt_bytes, all = SZ == 4 ? same_offset(w, u, V32(u->a), bytes) : NONE; \
    const u32 *a = V32(u->a); \
    if (all != NONE) { private_stored(w, all, bytes, ~0ull); memcpy(w->pvt + (u64)all * WAVE, V(u->d), (u64)bytes * WAVE); GO(u + 1); } \
    for (u64 m = w->exec; m; m &= m - 1) { \
      u32 i = (u32)__builtin_ctzll(m); u64 o = (u64)a[i] + (u64)(s64)u->imm; const RT *d = V(u->d) + i; \
      if (UNLIKELY(o + bytes > size || o > size)) { report(w, F_PRIVATE_OUT_OF_BOUNDS, u->pc, i, o, bytes, 1); continue; } \
      if (UNLIKELY(o & (SZ - 1))) { report(w, F_MISALIGNED, u->pc, i, o, bytes, 1); continue; } \
      private_stored(w, o, bytes, m & -m); \
      for (u32 c = 0; c < n; c++) { u64 q = o + c * SZ; *(MT *)(w->pvt + (q / 4 * WAVE + i) * 4 + (q & 3)) = (MT)d[c * WAVE]; } } \
    GO(u + 1); }
LDP(1, u8, u16, V16)
LDP(2, u16, u16, V16)
LDP(4, u32, u32, V32)

// *** images
// Register class of the instruction, CLASS_*: floats convert from and to float, unorm and snorm texels, integers from and to integers.

enum { CLASS_FLOAT, CLASS_UINT, CLASS_SINT };
static inline float st_sat(float x, float lo) { return x > lo ? (x < 1.0f ? x : 1.0f) : x != x ? 0.0f : lo; }

// One texel as four 32-bit words: float bits, or integers. Channels the format lacks are 0, 0, 1.
static inline void texel_load(const struct image *t, const u8 *p, u32 v[4]) {
  u32 raw[6] = {0, 0, 0, t->kind >= KIND_UINT ? 1 : 0x3f800000u, 0, t->kind >= KIND_UINT ? 1 : 0x3f800000u};
  for (u32 c = 0; c < t->comps; c++) {
    u32 x;
    if (t->bits == 32) memcpy(&x, p + 4 * c, 4);
    else if (t->bits == 16) { u16 h; memcpy(&h, p + 2 * c, 2); x = h; }
    else x = p[c];
    s32 sx = (s32)(x << (32 - t->bits)) >> (32 - t->bits);
    switch (t->kind) {
      case KIND_FLOAT: if (t->bits == 16) x = fbits(h2f_raw((u16)x)); break;
      case KIND_UNORM: x = fbits((float)((double)x / (double)((1ull << t->bits) - 1))); break;
      case KIND_SNORM: { double f = (double)sx / (double)((1ull << (t->bits - 1)) - 1); x = fbits((float)(f < -1 ? -1 : f)); break; }
      case KIND_SINT: x = (u32)sx; break;
    }
    raw[c] = x;
  }
  for (u32 c = 0; c < 4; c++) v[c] = raw[t->swiz >> (3 * c) & 7];
}

// Stores four channels (float bits or integers of the class). Integers saturate, as OpenCL's image writes do (assumed).
static inline void texel_store(const struct image *t, u8 *p, u32 class, const u32 v[4]) {
  for (u32 c = 0; c < t->comps; c++) {
    u32 x = v[c];
    float f = bitsf(x);
    switch (t->kind) {
      case KIND_FLOAT: if (t->bits == 16) x = f2h_raw(f); break;
      case KIND_UNORM: x = (u32)rint((double)st_sat(f, 0.0f) * (double)((1ull << t->bits) - 1)); break;
      case KIND_SNORM: x = (u32)(s32)rint((double)st_sat(f, -1.0f) * (double)((1ull << (t->bits - 1)) - 1)); break;
      case KIND_UINT: { u32 top = t->bits == 32 ? ~0u : (1u << t->bits) - 1; x = class == CLASS_SINT && (s32)x < 0 ? 0 : x > top ? top : x; break; }
      case KIND_SINT: { s64 top = (1ll << (t->bits - 1)) - 1, s = class == CLASS_SINT ? (s64)(s32)x : (s64)x; x = (u32)(s > top ? top : s < -top - 1 ? -top - 1 : s); break; }
    }
    memcpy(p + c * (t->bits / 8), &x, t->bits / 8);
  }
}

static inline int class_fits(W *w, const struct uop *u, u32 lane, const struct image *t, u32 class, int write) {
  if (LIKELY((class == CLASS_FLOAT) == (t->kind < KIND_UINT))) return 1;
  report(w, F_IMAGE, u->pc, lane, t->base, t->texel, (u32)write);
  return 0;
}

// Texel at integer coordinates; outside: border, or zeros.
static inline void fetch(W *w, const struct uop *u, u32 i, const struct image *t, u32 x, u32 y, u32 z, const u32 *border, u32 v[4]) {
  if (LIKELY(x < t->width && y < t->height && z < t->depth)) {
    const u8 *p = translate(w, u, i, t->base + (u64)z * t->layer + (u64)y * t->pitch + (u64)x * t->texel, t->texel, 0);
    w->wk->bytes_read += t->texel;
    if (p) { texel_load(t, p, v); return; }
  }
  else if (border) { memcpy(v, border, 16); return; }
  memset(v, 0, 16);
}

static inline s32 wrapped(u32 mode, s32 i, s32 n) {  // -1: border
  switch (mode) {
    case WRAP_REPEAT: i %= n; return i < 0 ? i + n : i;
    case WRAP_EDGE: return i < 0 ? 0 : i >= n ? n - 1 : i;
    case WRAP_MIRROR: i %= 2 * n; i = i < 0 ? i + 2 * n : i; return i < n ? i : 2 * n - 1 - i;
    default: return i < 0 || i >= n ? -1 : i;
  }
}

static void sample(W *w, const struct uop *u, u32 i, const struct image *t, const struct sampler *s, const float *xyz, u32 dims, u32 array,
                   const s32 *off, int linear, u32 v[4]) {
  s32 size[3] = {(s32)t->width, (s32)t->height, (s32)t->depth}, at[3][2] = {{0, 0}, {0, 0}, {0, 0}};
  float frac[3] = {0, 0, 0};
  linear = linear && t->kind < KIND_UINT;
  for (u32 k = 0; k < dims; k++) {
    float c = xyz[k];
    if (array && k == dims - 1) {  // layers are not filtered
      float l = rintf(c);
      at[k][0] = at[k][1] = l > 0 ? l < (float)(size[k] - 1) ? (s32)l : size[k] - 1 : 0;
      continue;
    }
    if (!s->unnorm) c *= (float)size[k];
    c += (float)off[k];
    if (!(fabsf(c) < 1073741824.0f)) c = c > 0 ? 1073741824.0f : c < 0 ? -1073741824.0f : 0;
    if (linear) {  // 8 bits of sub-texel position
      float f = floorf((c - 0.5f) * 256.0f + 0.5f) / 256.0f, lo = floorf(f);
      at[k][0] = wrapped(s->wrap[k], (s32)lo, size[k]), at[k][1] = wrapped(s->wrap[k], (s32)lo + 1, size[k]), frac[k] = f - lo;
    } else at[k][0] = at[k][1] = wrapped(s->wrap[k], (s32)floorf(c), size[k]);
  }
  float sum[4] = {0, 0, 0, 0};
  for (u32 n = 0; n < (linear ? 1u << dims : 1u); n++) {
    u32 px[4]; float weight = 1;
    u32 c[3];
    for (u32 k = 0; k < 3; k++) { c[k] = (u32)at[k][n >> k & 1]; if (linear && k < dims) weight *= n >> k & 1 ? frac[k] : 1 - frac[k]; }
    if (linear && weight == 0) continue;
    fetch(w, u, i, t, c[0], c[1], c[2], s->border, px);
    if (!linear) { memcpy(v, px, 16); return; }
    for (u32 k = 0; k < 4; k++) sum[k] += weight * bitsf(px[k]);
  }
  for (u32 k = 0; k < 4; k++) v[k] = fbits(sum[k]);
}

// d = first register, a = coordinates, b = second source (offsets, level), c = texture, or vector with sampler and texture
// aux: write mask | half << 4 | class << 5 | dims << 7 | array << 9 | offsets << 10 | level << 11 | indirect << 12 | filtered << 13; imm = sampler
H(TEX) {
  u32 mask = u->aux & 15, half = u->aux >> 4 & 1, class = u->aux >> 5 & 3, dims = u->aux >> 7 & 3, array = u->aux >> 9 & 1, noff = u->aux >> 10 & 1;
  const struct image *plain = u->aux >> 9 || (u32)u->c >= w->run->ntex ? NULL : &w->run->tex[u->c];
  if (LIKELY(plain && mask == 15 && !half && class == CLASS_FLOAT && dims == 2 && plain->kind == KIND_FLOAT && plain->comps == 4 && plain->swiz == 03210)) {
    const u32 *x = V32(u->a), *y = x + WAVE;  // what tinygrad's kernels do
    u32 *d = V32(u->d), px = plain->texel;
    for (u64 m = w->exec; m; m &= m - 1) {
      u32 i = (u32)__builtin_ctzll(m), v[4] = {0, 0, 0, 0}, row = plain->buffer ? 0 : y[i];
      const u8 *p = x[i] < plain->width && row < plain->height
        ? translate(w, u, i, plain->base + (u64)row * plain->pitch + (u64)x[i] * px, px, 0) : NULL;
      if (p && px == 16) memcpy(v, p, 16);
      else if (p) { u16 h[4]; memcpy(h, p, 8); for (u32 c = 0; c < 4; c++) v[c] = fbits(h2f_raw(h[c])); }
      if (p) w->wk->bytes_read += px;
      d[i] = v[0], d[i + WAVE] = v[1], d[i + 2 * WAVE] = v[2], d[i + 3 * WAVE] = v[3];
    }
    GO(u + 1);
  }
  u32 haslod = u->aux >> 11 & 1, indirect = u->aux >> 12 & 1, filtered = u->aux >> 13 & 1, ncomp = 32 - (u32)__builtin_clz(mask);
  for (u64 m = w->exec; m; m &= m - 1) {
    u32 i = (u32)__builtin_ctzll(m), v[4] = {0, 0, 0, 0};
    u32 slot = indirect ? V16(u->c)[WAVE + i] : (u32)u->c, sn = indirect ? V16(u->c)[i] : (u32)u->imm;
    const struct image *t = descriptor(w, u, i, slot, w->run->tex, w->run->ntex, 0);
    s32 off[3] = {0, 0, 0};
    u32 level = 0, spatial = array ? dims - 1 : dims;
    if (noff) for (u32 k = 0; k < spatial; k++) off[k] = (s32)V32(u->b)[k * WAVE + i];
    if (haslod) level = V32(u->b)[(noff ? spatial : 0) * WAVE + i];
    if (t && class_fits(w, u, i, t, class, 0)) {
      if (!filtered) {
        u32 c[3] = {V32(u->a)[i], t->buffer ? 0 : V32(u->a)[WAVE + i], dims == 3 ? V32(u->a)[2 * WAVE + i] : 0};
        for (u32 k = 0; k < 3; k++) c[k] += (u32)off[k];
        if (!level) fetch(w, u, i, t, c[0], c[1], c[2], NULL, v);
      } else if (sn >= w->run->nsamp) report(w, F_OUT_OF_BOUNDS, u->pc, i, sn, 0, 0);
      else {
        float xyz[3] = {bitsf(V32(u->a)[i]), bitsf(V32(u->a)[WAVE + i]), dims == 3 ? bitsf(V32(u->a)[2 * WAVE + i]) : 0};
        const struct sampler *s = &w->run->samp[sn];
        sample(w, u, i, t, s, xyz, dims, array, off, haslod && bitsf(level) > 0 ? s->linear_min : s->linear_mag, v);
      }
    }
    for (u32 c = 0; c < ncomp; c++) if (mask >> c & 1) {
      if (half) V16(u->d)[c * WAVE + i] = class == CLASS_FLOAT ? f2h(bitsf(v[c])) : (u16)v[c];
      else V32(u->d)[c * WAVE + i] = v[c];
    }
  }
  GO(u + 1);
}

H(SIZE) {  // size of an image: aux = mask | uav << 4 | indirect << 5 (texture: half vector c + 1), a = vector of the level, 0: none
  u32 mask = u->aux & 15, uav = u->aux >> 4 & 1, indirect = u->aux >> 5 & 1;
  for (u64 m = w->exec; m; m &= m - 1) {
    u32 i = (u32)__builtin_ctzll(m), slot = !indirect ? (u32)u->c : uav ? V32(u->c)[i] : V16(u->c)[WAVE + i], v[4] = {0, 0, 0, 0};
    const struct image *t = descriptor(w, u, i, slot, uav ? w->run->uav : w->run->tex, uav ? w->run->nuav : w->run->ntex, 0);
    if (t && !(u->a && V32(u->a)[i])) v[0] = t->width, v[1] = t->height, v[2] = t->depth;
    for (u32 c = 0; c < 4; c++) if (mask >> c & 1) V32(u->d)[c * WAVE + i] = v[c];
  }
  GO(u + 1);
}

// d = data (an atomic: old value, data, or old value, compare, data), a = coordinates, c = slot, or vector with it
// aux: components | half << 3 | class << 4 | dims << 6 | typed << 8 | indirect << 9; imm: 0 load, 1 store, else atomic operation | signed << 8
H(UAV) {
  u32 n = u->aux & 7, half = u->aux >> 3 & 1, class = u->aux >> 4 & 3, dims = u->aux >> 6 & 3, typed = u->aux >> 8 & 1, indirect = u->aux >> 9;
  int store = u->imm != 0;
  for (u64 m = w->exec; m; m &= m - 1) {
    u32 i = (u32)__builtin_ctzll(m), v[4] = {0, 0, 0, 0};
    const struct image *t = descriptor(w, u, i, indirect ? V32(u->c)[i] : (u32)u->c, w->run->uav, w->run->nuav, store);
    u32 x = V32(u->a)[i], y = dims > 1 ? V32(u->a)[WAVE + i] : 0, z = dims > 2 ? V32(u->a)[2 * WAVE + i] : 0;
    if (u->imm > 1) {
      u32 op = (u32)u->imm & 255, cmp = op == 21;
      u8 *p = NULL;
      if (t && (t->bits != 32 || t->comps != 1 || t->kind < KIND_UINT)) { report(w, F_IMAGE, u->pc, i, t->base, t->texel, 1); t = NULL; }
      if (t && x < t->width && y < t->height && z < t->depth)
        p = translate(w, u, i, t->base + (u64)z * t->layer + (u64)y * t->pitch + 4ull * x, 4, 1);
      w->wk->bytes_read += 4, w->wk->bytes_written += 4;
      V32(u->d)[i] = p ? atomic_on((u32 *)p, op, u->imm >> 8, V32(u->d)[(1 + cmp) * WAVE + i], V32(u->d)[WAVE + i]) : 0;
      continue;
    }
    if (store) for (u32 c = 0; c < n; c++) {
      u32 h = half ? V16(u->d)[c * WAVE + i] : V32(u->d)[c * WAVE + i];
      v[c] = !half ? h : class == CLASS_FLOAT && typed ? fbits(h2f_raw((u16)h)) : class == CLASS_SINT ? (u32)(s32)(int16_t)h : h;
    }
    if (typed) {
      if (t && class_fits(w, u, i, t, class, store)) {
        if (!store) fetch(w, u, i, t, x, y, z, NULL, v);
        else if (x < t->width && y < t->height && z < t->depth) {
          u8 *p = translate(w, u, i, t->base + (u64)z * t->layer + (u64)y * t->pitch + (u64)x * t->texel, t->texel, 1);
          if (p) texel_store(t, p, class, v), w->wk->bytes_written += t->texel;
        }
      }
    } else if (t) {  // raw elements of the register's size; each is bounded
      u32 size = half ? 2 : 4; u64 bytes = (u64)t->width * t->texel;
      if (!t->buffer) report(w, F_IMAGE, u->pc, i, t->base, size, (u32)store);
      else for (u32 c = 0; c < n; c++) {
        u64 o = ((u64)x + c) * size;
        if (o + size > bytes) continue;
        u8 *p = translate(w, u, i, t->base + o, size, store);
        if (p) { if (store) memcpy(p, &v[c], size); else memcpy(&v[c], p, size); }
        if (store) w->wk->bytes_written += size; else w->wk->bytes_read += size;
      }
    }
    if (!store) for (u32 c = 0; c < n; c++) {
      if (half) V16(u->d)[c * WAVE + i] = class == CLASS_FLOAT && typed ? f2h(bitsf(v[c])) : (u16)v[c];
      else V32(u->d)[c * WAVE + i] = v[c];
    }
  }
  GO(u + 1);
}

#include "lanes.h"  // generated: one LANE1/2/3 for each lane function, then `full` and `masked`

// *** workgroups

static void group_id(const struct run *r, u64 n, u64 total, u32 out[3]) {
  u64 g = n;
  if (r->order == 1) g = total - 1 - n;
  else if (r->order == 2 && total > 1) {  // a bijection of [0, total): odd multiplier on the next power of two, walked until it lands inside
    u64 bits = 64 - (u64)__builtin_clzll(total - 1), mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
    do { g = (g * (r->seed | 1) * 8 + g + (r->seed >> 7)) & mask; g ^= g >> (bits / 2 + 1); } while (g >= total);
  }
  out[0] = (u32)(g % r->groups[0]);
  out[1] = (u32)(g / r->groups[0] % r->groups[1]);
  out[2] = (u32)(g / r->groups[0] / r->groups[1]);
}

static void fill32(u32 *d, u32 v) { for (int i = 0; i < WAVE; i++) d[i] = v; }
static void fill16(u16 *d, u16 v) { for (int i = 0; i < WAVE; i++) d[i] = v; }

static u64 get_mode(void) {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  u64 v; __asm__ volatile("mrs %0, fpcr" : "=r"(v)); return v;
#else
#error "no flush-to-zero mode known for this CPU"
#endif
}
static void set_mode(u64 v) {
#if defined(__x86_64__)
  _mm_setcsr((u32)v);
#else
  __asm__ volatile("msr fpcr, %0" :: "r"(v));
#endif
}
#if defined(__x86_64__)
#define MODE_FTZ 0x9fc0u         /* FTZ, DAZ, all exceptions masked, round to nearest even */
#else
#define MODE_FTZ (1u << 24)      /* FZ */
#endif

struct shared { struct run *run; u64 next, total; u64 *bb; u32 failed; };

static void *work(void *arg) {
  struct shared *sh = arg;
  struct run *r = sh->run;
  u64 mode = get_mode();
  u32 fibers = r->local[0] * r->local[1] * r->local[2], nw = (fibers + WAVE - 1) / WAVE;
  u64 pvt = ((u64)r->pvt_bytes + 3) / 4 * 4 * WAVE, pvt_def = r->strict_local ? 8ull * r->pvt_bytes : 0, bb = 2ull * r->nbb * 8, loc = ((u64)r->local_bytes + 255) / 256 * 256;
  u64 need = (u64)nw * r->wave_bytes + nw * (pvt + pvt_def) + bb + 2 * loc + 4096 + 1024;
  u8 *mem = aligned_alloc(4096, (need + 4095) / 4096 * 4096);
  if (!mem) { __atomic_store_n(&sh->failed, 1, __ATOMIC_RELAXED); return NULL; }
  worker k = {.run = r};
  u8 *pv = mem + (u64)nw * r->wave_bytes;
  k.bb = (u64 *)(pv + nw * (pvt + pvt_def));
  k.local = (u8 *)k.bb + (bb + 255) / 256 * 256;
  k.consts = (u32 *)r->consts;
  if (r->own_consts) {
    k.consts = (u32 *)(k.local + 2 * loc);
    memcpy(k.consts, r->consts, 4096);
  }
  k.local_def = r->strict_local && r->local_bytes ? k.local + loc : NULL;
  memset(k.bb, 0, bb);
  set_mode(MODE_FTZ);

  // What no group changes: constants and immediates as vectors, local ids of a wave.
  u32 *ids = malloc((u64)nw * 3 * WAVE * 4 + 4);
  if (!ids) { set_mode(mode); free(mem); __atomic_store_n(&sh->failed, 1, __ATOMIC_RELAXED); return NULL; }
  for (u32 i = 0; i < nw * WAVE; i++) {
    u32 *t = ids + (u64)(i / WAVE) * 3 * WAVE + i % WAVE;
    t[0] = i % r->local[0], t[WAVE] = i / r->local[0] % r->local[1], t[2 * WAVE] = i / r->local[0] / r->local[1];
  }
  for (u32 v = 0; v < nw; v++) {
    W *w = (W *)(mem + (u64)v * r->wave_bytes);
    memset(w, 0, sizeof(W));
    w->base = r->uops, w->run = r, w->wk = &k, w->pvt = pv + v * pvt;
    w->pvt_def = pvt_def ? (u64 *)(pv + nw * pvt + v * pvt_def) : NULL;
    memset(w->pvt, 0xa5, pvt);
    for (u32 i = 0; i < r->nuni; i++) {
      const struct uni *n = &r->unis[i];
      u32 c = n->kind >= 2 ? r->consts[n->val] : n->val;
      if (n->kind == 0 || n->kind == 2) fill32(V32(n->off), c);
      else fill16(V16(n->off), n->kind == 4 ? f2h(bitsf(c)) : (u16)c);
    }
  }

  u64 chunk = sh->total / ((u64)r->threads * 8);
  chunk = chunk ? chunk : 1;
  for (u64 at = 0, left = 0; !*r->abort; at++, left--) {
    if (!left) {
      at = __atomic_fetch_add(&sh->next, chunk, __ATOMIC_RELAXED);
      if (at >= sh->total) break;
      left = sh->total - at < chunk ? sh->total - at : chunk;
    }
    u32 wg[3];
    group_id(r, at, sh->total, wg);
    u32 alive = nw, partial = 0, ext[3];
    for (u32 i = 0; i < 3; i++) {
      u64 rest = r->size[i] - (u64)wg[i] * r->local[i];
      ext[i] = rest < r->local[i] ? (partial = 1, (u32)rest) : r->local[i];
    }
    if (loc) memset(k.local, 0xa5, loc);
    if (r->own_consts) memcpy(k.consts, r->consts, 4096);
    if (k.local_def) memset(k.local_def, 0, loc);
    for (u32 v = 0; v < nw; v++) {
      W *w = (W *)(mem + (u64)v * r->wave_bytes);
      u32 n = fibers - v * WAVE;
      w->live = n >= WAVE ? ~0ull : (1ull << n) - 1;
      if (partial) for (u32 i = 0; i < WAVE; i++) {
        const u32 *t = ids + (u64)v * 3 * WAVE + i;
        if (t[0] >= ext[0] || t[WAVE] >= ext[1] || t[2 * WAVE] >= ext[2]) w->live &= ~(1ull << i);
      }
      w->exec = w->live;
      w->budget = r->budget, w->resume = r->uops, w->npark = 0, w->next = NONE, w->hit = NULL, w->deepest = r->branch_stack;
      if (pvt_def) memset(w->pvt_def, 0, pvt_def);
      if ((w->state = !w->live)) alive--;
      memcpy(w->wg, wg, sizeof(wg));
      memset(w->p, 0, sizeof(w->p));
      for (u32 i = 0; i < r->npoison32; i++) fill32(V32(r->poison[i]), 0xffa5ffa5u);
      for (u32 i = 0; i < r->npoison16; i++) fill16(V16(r->poison[r->npoison32 + i]), 0xffa5u);
      if (r->ndefs) memset((char *)w + r->def_base, 0, 8ull * r->ndefs);
      for (u32 i = 0; i < r->ndef_init; i++) DEF(r->def_init[i]) = ~0ull;
      for (u32 i = 0; i < 3; i++) {
        if (r->ids[i]) memcpy(V32(r->ids[i]), ids + ((u64)v * 3 + i) * WAVE, WAVE * 4);
        if (r->ids[3 + i]) fill32(V32(r->ids[3 + i]), wg[i]);
        if (r->ids[6 + i]) fill32(V32(r->ids[6 + i]), r->local[i]);
        if (r->ids[9 + i]) fill32(V32(r->ids[9 + i]), r->goff[i] + wg[i] * r->local[i]);
      }
      if (r->ids[12]) for (u32 i = 0; i < WAVE; i++) V32(r->ids[12])[i] = v * WAVE + i;
    }
    while (alive) {
      for (u32 i = 0; i < nw && !*r->abort; i++) {
        u32 v = r->order == 0 ? i : r->order == 1 ? nw - 1 - i : (u32)((i + r->seed + at) % nw);
        W *w = (W *)(mem + (u64)v * r->wave_bytes);
        if (w->state) continue;
        const void *const *tab = set_exec(w, w->exec);
        if (((handler)tab[w->resume->op])(w, w->resume, tab) == RET_END) w->state = 1, alive--;
      }
      if (*r->abort) break;
    }
  }
  for (u64 i = 0; i < 2ull * r->nbb; i++) __atomic_fetch_add(&r->bb[i], k.bb[i], __ATOMIC_RELAXED);
  __atomic_fetch_add(&r->bytes_read, k.bytes_read, __ATOMIC_RELAXED);
  __atomic_fetch_add(&r->bytes_written, k.bytes_written, __ATOMIC_RELAXED);
  free(ids);
  free(mem);
  set_mode(mode);
  return NULL;
}

// Runs all workgroups. Returns 0, or 1 if memory ran out.
__attribute__((visibility("default"))) int ir3_run(struct run *r) {
  struct shared sh = {.run = r, .total = (u64)r->groups[0] * r->groups[1] * r->groups[2]};
  pthread_t t[64];
  u32 n = r->threads > 64 ? 64 : r->threads, started = 0;
  r->threads = n = n > sh.total ? (u32)sh.total : n;
  for (u32 i = 1; i < n; i++) if (!pthread_create(&t[started], NULL, work, &sh)) started++;
  if (sh.total) work(&sh);
  for (u32 i = 0; i < started; i++) pthread_join(t[i], NULL);
  return (int)sh.failed;
}

// Sizes of the structures native.py mirrors, to catch a mismatch when the library is loaded.
__attribute__((visibility("default"))) u32 ir3_sizeof(u32 which) {
  const u32 sizes[] = {sizeof(struct run), sizeof(struct uop), sizeof(struct uni), sizeof(struct image),
                       sizeof(struct fault), sizeof(struct seg), sizeof(struct sampler), sizeof(W)};
  return which < sizeof(sizes) / 4 ? sizes[which] : 0;
}
