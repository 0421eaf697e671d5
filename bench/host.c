/* What host.py can't do in Python. */
#include <stddef.h>
#include <stdint.h>

/* A kernel that takes every ioctl and does nothing. */
int no_kernel(int fd, unsigned long request, void *arg) { return 0; }

/* Counts the blocks that Python's allocator of objects hands out. The caller passes PyMem_GetAllocator and PyMem_SetAllocator. */
typedef struct {
  void *ctx;
  void *(*malloc)(void *, size_t);
  void *(*calloc)(void *, size_t, size_t);
  void *(*realloc)(void *, void *, size_t);
  void (*free)(void *, void *);
} allocator;

enum { OBJECTS = 2 }; /* PYMEM_DOMAIN_OBJ */
static allocator real;
static void (*set)(int, allocator *);
static uint64_t count;

static void *count_malloc(void *ctx, size_t n) { count++; return real.malloc(ctx, n); }
static void *count_calloc(void *ctx, size_t n, size_t size) { count++; return real.calloc(ctx, n, size); }
static void *count_realloc(void *ctx, void *p, size_t n) { count += p == NULL; return real.realloc(ctx, p, n); }

void start(void (*get)(int, allocator *), void (*set_allocator)(int, allocator *)) {
  get(OBJECTS, &real);
  allocator counting = {real.ctx, count_malloc, count_calloc, count_realloc, real.free};
  count = 0;
  set = set_allocator;
  set(OBJECTS, &counting);
}
void stop(void) { set(OBJECTS, &real); }
uint64_t allocations(void) { return count; }
