/* A GPU for programs on a machine without one: preloaded below an unchanged CUDA build of torch, it answers what torch,
   Triton and NCCL's callers ask of the CUDA runtime, the driver, cuBLAS, cuDNN, NCCL and NVML.

   Device memory is address space that reads as zero, with the limit of an H100. Kernels do nothing. Collectives move
   nothing, but take place: they start in the order of their stream, and end once all their ranks have started them.
   The kernel of torch.cuda._sleep takes its time.
   Every call that a test may ask about is a line of a trace. docs/fake-gpu.md says what this proves.

   FAKE_GPU_DIR      folder, for one run, of the traces, and of the memory that the ranks of a node share
   FAKE_GPU_GIB      memory of a device, 79.1 unless set
   FAKE_GPU_STUCK    RANK:N, from its N-th collective on the device of this rank starts no more of them
   CUDA_VISIBLE_DEVICES, as always: how many devices there are

   fake_gpu.py compiles this, with a stub that returns 0 for each other function that torch links to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties

#define OUT_OF_MEMORY 2
#define NOT_READY 600
#define NAME "NVIDIA H100 80GB HBM3"
#define PROCESSORS 132
#define CYCLES_A_SECOND 1.98e9
#define CUDA_VERSION_SHOWN 13020
#define NCCL_VERSION_SHOWN 23007
/* Below 9.2.1 torch leaves attention to its own kernels: cuDNN's graphs are not imitated here. */
#define CUDNN_VERSION_SHOWN 90100
#define CONTEXT_BYTES (600ULL << 20) /* what a context takes of a device before any tensor */
#define PAGE_BYTES (2ULL << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int rank_of_process, n_devices, trace = -1;
static size_t device_bytes;
static const char *folder;
static __thread int device, last_error;

/* ---- address space: a region each for devices and for page-locked host memory; addresses are never used again */

typedef struct { char *start; size_t size, next; } Region;
static Region on_device = {0, 1ULL << 41, 0}, on_host = {0, 1ULL << 39, 0};

static int contains(const Region *region, const void *pointer) {
    return (char *)pointer >= region->start && (char *)pointer < region->start + region->size;
}

static void reserve(Region *region) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    region->start = mmap(0, region->size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (region->start == MAP_FAILED) {
        fprintf(stderr, "fake GPU: no address space\n");
        abort();
    }
}

/* ---- numbers that the ranks share, by name */

typedef struct { uint64_t key, value; } Cell;
#define CELLS (1 << 18)
static Cell *cells;

static void map_cells(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/shared", folder);
    int file = open(path, O_RDWR | O_CREAT, 0644);
    if (file < 0 || ftruncate(file, CELLS * sizeof(Cell))) abort();
    cells = mmap(0, CELLS * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
}

static uint64_t *shared(const char *communicator, const char *what, int a, int b) {
    char name[400];
    snprintf(name, sizeof name, "%s %s %d %d", communicator, what, a, b);
    uint64_t key = 1469598103934665603ULL; /* FNV-1a */
    for (char *at = name; *at; at++) key = (key ^ (unsigned char)*at) * 1099511628211ULL;
    for (uint64_t i = key;; i++) {
        Cell *cell = &cells[i % CELLS];
        uint64_t found = __sync_val_compare_and_swap(&cell->key, 0, key);
        if (!found || found == key) return &cell->value;
    }
}

static uint64_t load(uint64_t *value) { return __atomic_load_n(value, __ATOMIC_SEQ_CST); }

/* ---- start */

static int stuck_from = -1;

static void open_trace(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/rank-%d.%d.trace", folder, rank_of_process, getpid());
    trace = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
}

static void begin(void) {
    const char *rank = getenv("RANK"), *visible = getenv("CUDA_VISIBLE_DEVICES"), *gib = getenv("FAKE_GPU_GIB");
    folder = getenv("FAKE_GPU_DIR");
    rank_of_process = rank ? atoi(rank) : -1;
    device_bytes = (size_t)((gib ? atof(gib) : 79.1) * (1 << 30));
    n_devices = !visible || *visible;
    for (; visible && *visible; visible++) n_devices += *visible == ',';
    int who, from;
    const char *stuck = getenv("FAKE_GPU_STUCK");
    if (stuck && sscanf(stuck, "%d:%d", &who, &from) == 2 && who == rank_of_process) stuck_from = from;
    reserve(&on_device);
    reserve(&on_host);
    if (!folder) return;
    map_cells();
    if (rank) open_trace(); /* else a launcher, or a process that learns its rank with its first communicator */
}

static void start(void) { pthread_once(&once, begin); }

/* A line of the trace: a word, then the facts. */
static void say(const char *format, ...) {
    start();
    if (trace < 0) return;
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length] = '\n';
    if (write(trace, line, length + 1) < 0) abort();
}

/* For the program itself, by ctypes: a line that says where it is. */
void fake_gpu_mark(const char *text) { say("mark %s", text); }

/* ---- what the device has to do: nodes in a list, each after those that it names

   Kernels and copies end as soon as all before them in their stream has, so that only collectives are nodes, kernels
   that sleep, and the joints where a stream waits for an event or a group of collectives ends. Nobody runs the list
   but the calls that add to it or look at it. */

typedef struct { int ranks, rank, splits, aborted; char name[200]; uint64_t **started; } Comm;
typedef struct { long tail; } Stream; /* its last node, 0 for none */
typedef struct { long node; } Event;
typedef enum { JOINT, SLEEP, COLLECTIVE, PEER } Kind;
typedef struct {
    Kind kind;
    long after, also, first; /* nodes before this one; of a group's joint, all from `first` on too */
    Comm *comm;
    uint64_t *mine, *theirs; /* of a send or a receive: how many have started here, and there */
    uint64_t number;
    double seconds, until; /* of a kernel that sleeps: how long, and until when */
    int has_started, is_done;
} Node;

static pthread_mutex_t queue = PTHREAD_MUTEX_INITIALIZER;
static Node *nodes;
static long n_nodes = 1, n_capacity, n_done = 1; /* all below n_done are done; node 0 is none */
static long n_collectives;
static Stream default_stream;
static __thread int group_depth;
static __thread long group_first;
static __thread Stream *group_stream;

static Stream *stream_of(void *stream) { return (uintptr_t)stream < 16 ? &default_stream : stream; }

static int is_done(long node) { return node < n_done || nodes[node].is_done; }

static int comes_next(long at) {
    Node *node = &nodes[at];
    if (!is_done(node->after) || !is_done(node->also)) return 0;
    for (long before = node->first; before && before < at; before++)
        if (!is_done(before)) return 0;
    return 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int has_ended(Node *node) {
    if (node->kind == JOINT) return 1;
    if (node->kind == SLEEP) return now() >= node->until;
    if (node->comm->aborted) return 1;
    if (node->kind == PEER) return load(node->theirs) >= node->number;
    for (int rank = 0; rank < node->comm->ranks; rank++)
        if (load(node->comm->started[rank]) < node->number) return 0;
    return 1;
}

static void advance(void) {
    for (long at = n_done; at < n_nodes; at++) {
        Node *node = &nodes[at];
        if (node->is_done || !comes_next(at)) continue;
        if (!node->has_started && node->kind == SLEEP) node->until = now() + node->seconds;
        if (!node->has_started && node->comm) {
            if (stuck_from >= 0 && n_collectives >= stuck_from) continue;
            n_collectives++;
            node->number = __sync_add_and_fetch(node->mine, 1);
        }
        node->has_started = 1;
        node->is_done = has_ended(node);
    }
    while (n_done < n_nodes && nodes[n_done].is_done) n_done++;
}

static long add(Node node) {
    if (n_nodes >= n_capacity) {
        n_capacity = 2 * n_capacity + 4096;
        nodes = realloc(nodes, n_capacity * sizeof *nodes);
    }
    nodes[n_nodes] = node;
    return n_nodes++;
}

static int done(long node) {
    pthread_mutex_lock(&queue);
    advance();
    int result = is_done(node);
    pthread_mutex_unlock(&queue);
    return result;
}

static void wait_for(long node) {
    while (!done(node)) usleep(300);
}

/* Add a collective, or a send or receive, to a stream. Those of one group do not wait for each other. */
static int issue(Comm *comm, Kind kind, uint64_t *mine, uint64_t *theirs, void *handle) {
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&queue);
    long node = add((Node){.kind = kind, .after = stream->tail, .comm = comm, .mine = mine, .theirs = theirs});
    if (!group_depth) {
        stream->tail = node;
    } else if (!group_first) {
        group_first = node;
        group_stream = stream;
    }
    advance();
    pthread_mutex_unlock(&queue);
    return 0;
}

static void end_group(void) {
    if (--group_depth || !group_first) return;
    pthread_mutex_lock(&queue);
    group_stream->tail = add((Node){.kind = JOINT, .after = group_stream->tail, .first = group_first});
    group_first = 0;
    advance();
    pthread_mutex_unlock(&queue);
}

/* ---- devices */

cudaError_t cudaGetDeviceCount(int *count) {
    start();
    *count = n_devices;
    return n_devices ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *number) { start(); *number = device; return 0; }
cudaError_t cudaSetDevice(int number) { start(); device = number; return 0; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int number) {
    start();
    *p = (struct cudaDeviceProp){
        .name = NAME, .totalGlobalMem = device_bytes, .major = 9, .minor = 0, .multiProcessorCount = PROCESSORS,
        .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536,
        .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472,
        .reservedSharedMemPerBlock = 1024, .l2CacheSize = 52428800, .totalConstMem = 65536, .memoryBusWidth = 5120,
        .textureAlignment = 512, .unifiedAddressing = 1, .managedMemory = 1, .concurrentKernels = 1,
        .cooperativeLaunch = 1, .asyncEngineCount = 3, .canMapHostMemory = 1, .streamPrioritiesSupported = 1,
        .computePreemptionSupported = 1, .memoryPoolsSupported = 1, .pciBusID = 16 + number};
    return 0;
}
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int number) {
    return cudaGetDeviceProperties(p, number);
}

/* The driver numbers its attributes as the runtime does. */
static int attribute(int which) {
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return PROCESSORS;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrClockRate: return CYCLES_A_SECOND / 1000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory: case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrConcurrentManagedAccess: case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported:
    case 102: /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, for expandable segments */ return 1;
    default: return 0;
    }
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int number) {
    start();
    *value = attribute(which);
    return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION_SHOWN; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION_SHOWN; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int number) {
    snprintf(text, size, "0000:%02x:00.0", 16 + number);
    return 0;
}
static const char *words(int error) {
    return error == OUT_OF_MEMORY ? "out of memory" : error == NOT_READY ? "device not ready" : "no error";
}
const char *cudaGetErrorString(cudaError_t error) { return words(error); }
const char *cudaGetErrorName(cudaError_t error) { return words(error); }
cudaError_t cudaGetLastError(void) { int error = last_error; last_error = 0; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* ---- memory */

typedef struct { char *start; size_t size; } Block;
static Block *blocks;
static size_t n_blocks, block_capacity, used_bytes;

static void *take(Region *region, size_t size) {
    start();
    pthread_mutex_lock(&lock);
    size_t pages = (size + PAGE_BYTES - 1) / PAGE_BYTES + !size;
    char *at = region->start + region->next;
    region->next += pages * PAGE_BYTES;
    if (region->next > region->size) {
        fprintf(stderr, "fake GPU: its address space is used up\n");
        abort();
    }
    if (n_blocks == block_capacity) {
        block_capacity = 2 * block_capacity + 1024;
        blocks = realloc(blocks, block_capacity * sizeof *blocks);
    }
    blocks[n_blocks++] = (Block){at, size};
    pthread_mutex_unlock(&lock);
    return at;
}

static size_t drop(void *pointer) {
    pthread_mutex_lock(&lock);
    size_t size = 0;
    for (size_t i = n_blocks; i-- && !size;) {
        if (blocks[i].start != pointer) continue;
        size = blocks[i].size;
        blocks[i] = blocks[--n_blocks];
        madvise(pointer, size, MADV_DONTNEED);
    }
    pthread_mutex_unlock(&lock);
    return size;
}

static int use(size_t size) {
    pthread_mutex_lock(&lock);
    int fits = used_bytes + size <= device_bytes - CONTEXT_BYTES;
    if (fits) used_bytes += size;
    pthread_mutex_unlock(&lock);
    say("allocate bytes=%zu used=%zu fits=%d", size, used_bytes, fits);
    return fits;
}

static void give_back(size_t size) {
    pthread_mutex_lock(&lock);
    used_bytes -= size;
    pthread_mutex_unlock(&lock);
    say("release bytes=%zu used=%zu", size, used_bytes);
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    start();
    if (!use(size)) return last_error = OUT_OF_MEMORY;
    *pointer = take(&on_device, size);
    return 0;
}
cudaError_t cudaFree(void *pointer) {
    if (pointer) give_back(drop(pointer));
    return 0;
}
cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned flags) { return cudaMalloc(pointer, size); }
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { return cudaMalloc(pointer, 4096); }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    *pointer = take(&on_host, size);
    say("pin bytes=%zu", size);
    return 0;
}
cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
cudaError_t cudaFreeHost(void *pointer) { drop(pointer); return 0; }
static Block locked[64];
static int is_locked(const void *pointer) {
    int found = 0;
    for (size_t i = 0; i < 64; i++)
        found |= (size_t)((const char *)pointer - locked[i].start) < locked[i].size;
    return found;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    size_t i = 0;
    while (i < 63 && locked[i].size) i++;
    locked[i] = (Block){pointer, size};
    say("pin bytes=%zu", size);
    return 0;
}
cudaError_t cudaHostUnregister(void *pointer) {
    for (size_t i = 0; i < 64; i++)
        if (locked[i].start == pointer) locked[i].size = 0;
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    start();
    *total = device_bytes;
    *free_bytes = device_bytes - CONTEXT_BYTES - used_bytes;
    return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    start();
    memset(attributes, 0, sizeof *attributes);
    attributes->device = device;
    attributes->type = cudaMemoryTypeUnregistered;
    if (contains(&on_device, pointer)) attributes->type = cudaMemoryTypeDevice;
    if (contains(&on_host, pointer)) attributes->type = cudaMemoryTypeHost;
    if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = (void *)pointer;
    if (attributes->type != cudaMemoryTypeDevice) attributes->hostPointer = (void *)pointer;
    return 0;
}

/* The host waits for a copy from or to memory that is not page-locked. Values reach the host, but not the device. */
static int copy(void *to, const void *from, size_t size, int waits, void *stream) {
    start();
    int up = contains(&on_device, to), down = contains(&on_device, from);
    const void *host = up ? from : to;
    int pageable = up != down && !contains(&on_host, host) && !is_locked(host);
    const char *way = up && down ? "D2D" : up ? "H2D" : down ? "D2H" : "H2H";
    if ((pageable || waits) && !(up && !down)) wait_for(stream_of(stream)->tail);
    const char *memory = pageable ? "pageable" : "pinned";
    say("copy way=%s memory=%s bytes=%zu waits=%d", way, memory, size, pageable || waits);
    if (!up) memcpy(to, from, size);
    return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return copy(to, from, size, 1, 0);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, size, 0, stream);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) {
    return copy(to, from, size, 0, stream);
}

/* ---- streams and events */

static void *handle(void) { /* of something that only has a name here */
    static uintptr_t next = 0x1000;
    return (void *)__sync_add_and_fetch(&next, 16);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { *stream = calloc(1, sizeof(Stream)); return 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    wait_for(stream_of(stream)->tail);
    say("wait for=stream");
    return 0;
}
cudaError_t cudaDeviceSynchronize(void) {
    pthread_mutex_lock(&queue);
    long last = n_nodes;
    pthread_mutex_unlock(&queue);
    for (long node = 1; node < last; node++) wait_for(node);
    say("wait for=device");
    return 0;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return done(stream_of(stream)->tail) ? 0 : (last_error = NOT_READY);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&queue);
    long also = ((Event *)event)->node;
    if (!is_done(also)) stream->tail = add((Node){.kind = JOINT, .after = stream->tail, .also = also});
    pthread_mutex_unlock(&queue);
    return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = calloc(1, sizeof(Event)); return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((Event *)event)->node = stream_of(stream)->tail;
    return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    wait_for(((Event *)event)->node);
    say("wait for=event");
    return 0;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return done(((Event *)event)->node) ? 0 : (last_error = NOT_READY);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t a, cudaEvent_t b) { *milliseconds = 1; return 0; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) { function(data); return 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, 0, data);
    return 0;
}

/* ---- kernels: those compiled into torch's libraries register themselves, with names */

typedef struct { const void *function; const char *name; } Kernel;
static Kernel *kernels;
static size_t n_kernels, kernel_capacity, n_sorted;

void **__cudaRegisterFatBinary(void *binary) { static void *any[2]; return any; }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
void __cudaRegisterVar(void **b, char *v, char *a, const char *name, int e, size_t size, int c, int g) {}
void __cudaRegisterFunction(
    void **binary, const char *function, char *unused, const char *name, int limit, void *a, void *b, void *c,
    void *d, int *e) {
    if (n_kernels == kernel_capacity) {
        kernel_capacity = 2 * kernel_capacity + 65536;
        kernels = realloc(kernels, kernel_capacity * sizeof *kernels);
    }
    kernels[n_kernels++] = (Kernel){function, name};
}

static int by_address(const void *a, const void *b) {
    const Kernel *first = a, *second = b;
    return (first->function > second->function) - (first->function < second->function);
}

/* Add a kernel that sleeps for a number of clock cycles. */
static void sleep_for(int64_t cycles, void *handle) {
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&queue);
    stream->tail = add((Node){.kind = SLEEP, .after = stream->tail, .seconds = cycles / CYCLES_A_SECOND});
    advance();
    pthread_mutex_unlock(&queue);
}

static int launch(const void *function, void **arguments, void *stream) {
    pthread_mutex_lock(&lock);
    if (n_sorted != n_kernels) qsort(kernels, n_kernels, sizeof *kernels, by_address);
    n_sorted = n_kernels;
    Kernel wanted = {function, 0}, *found = bsearch(&wanted, kernels, n_kernels, sizeof *kernels, by_address);
    pthread_mutex_unlock(&lock);
    const char *name = found ? found->name : "unknown";
    say("launch %.400s", name);
    if (strstr(name, "spin_kernel")) sleep_for(*(int64_t *)arguments[0], stream);
    return 0;
}

static __thread void *stream_of_call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, void *stream) {
    stream_of_call = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *memory, void *stream) {
    *grid = *block = (dim3){1, 1, 1};
    *memory = 0;
    *(void **)stream = stream_of_call;
    return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (void *)function; return 0; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 g, dim3 b, void **a, size_t m, cudaStream_t stream) {
    return launch(kernel, a, stream);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 g, dim3 b, void **a, size_t m, cudaStream_t stream) {
    return launch(function, a, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(function, arguments, config->stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 64, .ptxVersion = 90, .binaryVersion = 90,
        .maxDynamicSharedSizeBytes = 232448};
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t memory) {
    *n = 2;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *n, const void *f, int block, size_t memory, unsigned flags) {
    *n = 2;
    return 0;
}

/* ---- the driver, for expandable segments and for Triton's kernels */

typedef unsigned long long Address;
typedef struct { char name[200]; } Function;

static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
    char second[256];
    snprintf(second, sizeof second, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, second);
    if (!*function) *function = nothing;
    if (result) *result = cudaDriverEntryPointSuccess;
    return 0;
}
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = CUDA_VERSION_SHOWN; return 0; }
int cuDeviceGetCount(int *count) { start(); *count = n_devices; return 0; }
int cuDeviceGet(int *number, int index) { *number = index; return 0; }
int cuDeviceGetAttribute(int *value, int which, int number) { *value = attribute(which); return 0; }
int cuDeviceGetName(char *text, int size, int number) { snprintf(text, size, NAME); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int number) { start(); *bytes = device_bytes; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuCtxGetDevice(int *number) { *number = device; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int number) { *context = (void *)16; return 0; }
int cuDevicePrimaryCtxGetState(int number, unsigned *flags, int *is_active) {
    if (flags) *flags = 0;
    *is_active = number == device;
    return 0;
}
int cuModuleLoadData(void **module, const void *image) { *module = handle(); return 0; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *o, void *v) {
    *module = handle();
    return 0;
}
int cuModuleLoad(void **module, const char *file) { *module = handle(); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    Function *made = calloc(1, sizeof *made);
    snprintf(made->name, sizeof made->name, "%s", name);
    *function = made;
    return 0;
}
int cuFuncGetAttribute(int *value, int which, void *function) {
    *value = which == cudaFuncAttributePreferredSharedMemoryCarveout ? 0 : which == 0 ? 1024 : which == 4 ? 64 : 0;
    return 0;
}
int cuGetErrorString(int error, const char **text) { *text = words(error); return 0; }
int cuPointerGetAttribute(void *out, int which, Address pointer) {
    if (which == 3 || which == 4) *(Address *)out = pointer;                                /* device, host pointer */
    else if (which == 2) *(unsigned *)out = contains(&on_device, (void *)pointer) ? 2 : 1; /* kind of memory */
    else memset(out, 0, 4);
    return 0;
}
int cuLaunchKernel(
    Function *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned memory,
    void *stream, void **arguments, void **extra) {
    say("launch triton:%s", function->name);
    return 0;
}
int cuLaunchKernelEx(const void *config, Function *function, void **arguments, void **extra) {
    say("launch triton:%s", function->name);
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t m) { *n = 2; return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *function, void *config) { *n = 2; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuMemAddressReserve(Address *at, size_t size, size_t alignment, Address hint, unsigned long long flags) {
    *at = (Address)take(&on_device, size);
    return 0;
}
int cuMemAddressFree(Address at, size_t size) { drop((void *)at); return 0; }
int cuMemCreate(Address *memory, size_t size, const void *properties, unsigned long long flags) {
    if (!use(size)) return OUT_OF_MEMORY;
    *memory = (Address)memcpy(malloc(sizeof size), &size, sizeof size);
    return 0;
}
int cuMemRelease(Address memory) {
    give_back(*(size_t *)memory);
    free((void *)memory);
    return 0;
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *p, int option) { *bytes = PAGE_BYTES; return 0; }

/* ---- cuBLAS and cuDNN: handles, one algorithm, and matrix products that are launches */

int cublasCreate_v2(void **made) { *made = handle(); return 0; }
int cublasGetMathMode(void *blas, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *blas, int *mode) { *mode = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130200; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = handle(); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *made = handle();
    return 0;
}
int cublasLtMatmulPreferenceCreate(void **made) { *made = handle(); return 0; }
typedef struct { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } Heuristic;
int cublasLtMatmulAlgoGetHeuristic(
    void *blas, void *product, void *a, void *b, void *c, void *d, void *preference, int most, Heuristic *results,
    int *found) {
    *results = (Heuristic){0};
    *found = 1;
    return 0;
}
#define LAUNCH(function) \
    int function() { say("launch " #function); return 0; }
LAUNCH(cublasLtMatmul)
LAUNCH(cublasGemmEx)
LAUNCH(cublasGemmStridedBatchedEx)
LAUNCH(cublasSgemm_v2)
LAUNCH(cublasSgemmStridedBatched)
LAUNCH(cublasDgemm_v2)
LAUNCH(cublasSgemmEx)
size_t cudnnGetVersion(void) { return CUDNN_VERSION_SHOWN; }
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION_SHOWN; }
const char *cudnnGetErrorString(int error) { return words(error); }
int cudnnCreate(void **made) { *made = handle(); return 0; }

/* ---- NCCL */

typedef struct { char name[128]; } UniqueId;

static Comm *communicator(int ranks, int rank, const char *name, const char *by) {
    Comm *made = calloc(1, sizeof *made);
    made->ranks = ranks;
    made->rank = rank;
    snprintf(made->name, sizeof made->name, "%s", name);
    made->started = calloc(ranks, sizeof *made->started);
    for (int each = 0; each < ranks; each++) made->started[each] = shared(name, "started", each, 0);
    say("communicator %s by=%s ranks=%d rank=%d", name, by, ranks, rank);
    return made;
}

int ncclGetVersion(int *version) { *version = NCCL_VERSION_SHOWN; return 0; }
int ncclGetUniqueId(UniqueId *id) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->name, sizeof id->name, "%d-%lx", getpid(), (long)now.tv_nsec);
    return 0;
}
const char *ncclGetErrorString(int error) { return words(error); }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclCommInitRankConfig(Comm **made, int ranks, UniqueId id, int rank, void *config) {
    start();
    if (rank_of_process < 0 && folder) {
        rank_of_process = rank;
        open_trace();
    }
    *made = communicator(ranks, rank, id.name, "init");
    return 0;
}
int ncclCommInitRank(Comm **made, int ranks, UniqueId id, int rank) {
    return ncclCommInitRankConfig(made, ranks, id, rank, 0);
}
int ncclCommInitRankScalable(Comm **made, int ranks, int rank, int n_ids, UniqueId *ids, void *config) {
    return ncclCommInitRankConfig(made, ranks, *ids, rank, config);
}

/* All ranks of the parent call it, and wait until each has said its color and key; less than 0 is no color. */
int ncclCommSplit(Comm *parent, int color, int key, Comm **made, void *config) {
    int number = parent->splits++, ranks = 0, rank = 0;
    uint64_t said = 1ULL << 63 | (uint64_t)(color & 0x7fffffff) << 32 | (uint32_t)key;
    *shared(parent->name, "split", number, parent->rank) = said;
    for (int each = 0; each < parent->ranks; each++) {
        uint64_t *other = shared(parent->name, "split", number, each);
        while (!load(other)) usleep(300);
        if (*other >> 32 != said >> 32) continue;
        ranks++;
        rank += (int)*other < key || ((int)*other == key && each < parent->rank);
    }
    char name[180];
    snprintf(name, sizeof name, "%.150s.%d_%d", parent->name, number, color);
    if (color >= 0) {
        *made = communicator(ranks, rank, name, "split");
        return 0;
    }
    *made = 0;
    say("split-without-color %s", name);
    return 0;
}
int ncclCommCount(Comm *comm, int *ranks) { *ranks = comm->ranks; return 0; }
int ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return 0; }
int ncclCommGetAsyncError(Comm *comm, int *error) { *error = 0; return 0; }
int ncclCommAbort(Comm *comm) {
    say("abort %s", comm->name);
    comm->aborted = 1;
    return 0;
}
int ncclGroupStart(void) { group_depth++; return 0; }
int ncclGroupEnd(void) { end_group(); return 0; }

static int collective(const char *what, Comm *comm, size_t count, int type, int more, void *stream) {
    say("collective %s comm=%s count=%zu type=%d more=%d stream=%p", what, comm->name, count, type, more, stream);
    return issue(comm, COLLECTIVE, comm->started[comm->rank], 0, stream);
}
int ncclAllReduce(const void *s, void *r, size_t count, int type, int operation, Comm *comm, void *stream) {
    return collective("all_reduce", comm, count, type, operation, stream);
}
int ncclAllGather(const void *s, void *r, size_t count, int type, Comm *comm, void *stream) {
    return collective("all_gather", comm, count, type, 0, stream);
}
int ncclReduceScatter(const void *s, void *r, size_t count, int type, int operation, Comm *comm, void *stream) {
    return collective("reduce_scatter", comm, count, type, operation, stream);
}
int ncclBroadcast(const void *s, void *r, size_t count, int type, int root, Comm *comm, void *stream) {
    return collective("broadcast", comm, count, type, root, stream);
}
int ncclBcast(void *buffer, size_t count, int type, int root, Comm *comm, void *stream) {
    return collective("broadcast", comm, count, type, root, stream);
}
int ncclReduce(const void *s, void *r, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    return collective("reduce", comm, count, type, root, stream);
}
int ncclAlltoAll(const void *s, void *r, size_t count, int type, Comm *comm, void *stream) {
    return collective("all_to_all", comm, count, type, 0, stream);
}

static int peer_to_peer(const char *what, Comm *comm, int from, int to, size_t count, int type, void *stream) {
    uint64_t *sent = shared(comm->name, "sent", from, to), *received = shared(comm->name, "received", from, to);
    int sends = !strcmp(what, "send");
    say("%s comm=%s from=%d to=%d count=%zu type=%d stream=%p", what, comm->name, from, to, count, type, stream);
    return issue(comm, PEER, sends ? sent : received, sends ? received : sent, stream);
}
int ncclSend(const void *buffer, size_t count, int type, int peer, Comm *comm, void *stream) {
    return peer_to_peer("send", comm, comm->rank, peer, count, type, stream);
}
int ncclRecv(void *buffer, size_t count, int type, int peer, Comm *comm, void *stream) {
    return peer_to_peer("receive", comm, peer, comm->rank, count, type, stream);
}

/* ---- NVML */

#define NOT_SUPPORTED 3
int nvmlDeviceGetCount_v2(unsigned *count) { start(); *count = n_devices; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **made) { *made = handle(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **made) { *made = handle(); return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *gpu, unsigned *count, void *found) { *count = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION_SHOWN; return 0; }
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetGpuFabricInfoV() { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState() { return NOT_SUPPORTED; }
