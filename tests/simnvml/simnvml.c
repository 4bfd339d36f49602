/* A stand-in for libnvidia-ml.so.1 that answers from a shared state file (see layout.py and README.md).
 *
 * The state lies beside the library: DIRECTORY/state. Structures follow the public ABI of NVML; only what the
 * collector and common tools ask for is here. Nothing in this file says how NVIDIA's driver behaves.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "simnvml_layout.h"

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
typedef void *nvmlEventSet_t;
enum {
  OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18,
  ARGUMENT_VERSION_MISMATCH = 25
};

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned version, sensor; int temperature; } temperature_v1;
typedef struct { unsigned version; int margin; } margin_v1;
typedef struct { unsigned max, high, partial, low, none; } histogram;
typedef struct { unsigned version, flag; } unrepairable_v1;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_v2;
typedef struct { nvmlDevice_t device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_data;
typedef struct {
  unsigned id, scope; long long timestamp, latency; unsigned type; nvmlReturn_t ret; unsigned long long value;
} field_value;
typedef struct {
  char bus_id_legacy[16]; unsigned domain, bus, device, pci_device_id, pci_subsystem_id; char bus_id[32];
} pci_info;
typedef struct {
  unsigned version; unsigned long long agg_parity, agg_secded, agg_cor, vol_parity, vol_secded, vol_cor;
  unsigned long long l2, sm, pcie, mcu, other; unsigned threshold;
} sram_v1;
typedef struct {
  unsigned version; uint8_t cluster[16]; nvmlReturn_t status; uint32_t clique; unsigned state; uint32_t mask;
  uint8_t summary;
} fabric_v3;
typedef struct { unsigned long long total, free, used; } bar1;

#define VERSION(type, number) ((unsigned)(sizeof(type) | ((unsigned)(number) << 24)))

static State *state;
static int initialised;
static uint32_t generation;
static char loaded_version[80];
static int slots[MAX_GPUS], slot_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int forewarn_simulated_nvml = 1; /* the mark by which readings from here are told from real ones */

static void nap(long microseconds) {
  struct timespec t = {microseconds / 1000000, (microseconds % 1000000) * 1000};
  nanosleep(&t, NULL);
}

static uint32_t read_begin(void) {
  /* A writer that died inside an update must not hang the reader for ever: give up after a tenth of a second. */
  for (int i = 0; i < 1000; i++) {
    uint32_t s = __atomic_load_n(&state->sequence, __ATOMIC_ACQUIRE);
    if (!(s & 1)) return s;
    nap(100);
  }
  return __atomic_load_n(&state->sequence, __ATOMIC_ACQUIRE);
}
static int read_again(uint32_t s) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&state->sequence, __ATOMIC_RELAXED) != s;
}
#define CONSISTENT(...) do { uint32_t s_; do { s_ = read_begin(); __VA_ARGS__ } while (read_again(s_)); } while (0)

__attribute__((constructor)) static void load(void) {
  Dl_info info;
  char path[4096];
  if (!dladdr((void *)&load, &info) || !info.dli_fname) return;
  snprintf(path, sizeof path, "%s", info.dli_fname);
  char *slash = strrchr(path, '/');
  if (!slash || (size_t)(slash - path) > sizeof path - 8) return;
  strcpy(slash, "/state");
  int fd = open(path, O_RDWR | O_CLOEXEC);
  struct stat st;
  if (fd < 0) return;
  if (fstat(fd, &st) == 0 && (size_t)st.st_size >= sizeof(State)) {
    void *p = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p != MAP_FAILED) state = p;
  }
  close(fd);
  if (state && (state->magic != SIM_MAGIC || state->version != SIM_LAYOUT)) state = NULL;
  if (state) CONSISTENT({ memcpy(loaded_version, state->library_version, sizeof loaded_version); });
}

static nvmlReturn_t suffer(Fault *fault) {
  __atomic_fetch_add(&fault->calls, 1, __ATOMIC_RELAXED);
  uint32_t latency = __atomic_load_n(&fault->latency_us, __ATOMIC_RELAXED);
  if (latency) nap(latency);
  while (__atomic_load_n(&fault->hang, __ATOMIC_RELAXED)) nap(5000);
  return __atomic_load_n(&fault->error, __ATOMIC_RELAXED);
}

static nvmlReturn_t enter(int call) {
  if (!state) return DRIVER_NOT_LOADED;
  nvmlReturn_t r = suffer(&state->fault[call]);
  if (r) return r;
  if (!initialised) return UNINITIALIZED;
  if (strncmp(loaded_version, state->kernel_version, sizeof loaded_version)) return LIB_RM_VERSION_MISMATCH;
  if (generation != state->generation) return UNINITIALIZED;
  return OK;
}

static nvmlReturn_t enter_gpu(int call, nvmlDevice_t handle, Gpu **gpu) {
  nvmlReturn_t r = enter(call);
  if (r) return r;
  uintptr_t slot = (uintptr_t)handle - 1;
  if (slot >= MAX_GPUS) return INVALID_ARGUMENT;
  *gpu = &state->gpu[slot];
  if ((r = suffer(&(*gpu)->fault[call]))) return r;
  if (!(*gpu)->present) return GPU_IS_LOST;
  return (*gpu)->error;
}

#define GPU(call) Gpu *gpu; do { nvmlReturn_t r_ = enter_gpu(C_##call, device, &gpu); if (r_) return r_; } while (0)
#define NEED(p) do { if (!(p)) return INVALID_ARGUMENT; } while (0)

static nvmlReturn_t get_uint(Gpu *gpu, int id, unsigned *out) {
  nvmlReturn_t r;
  if (!out) return INVALID_ARGUMENT;
  CONSISTENT({ r = gpu->value[id].ret; if (!r) *out = (unsigned)gpu->value[id].value; });
  return r;
}
static nvmlReturn_t get_ull(Gpu *gpu, int id, unsigned long long *out) {
  nvmlReturn_t r;
  if (!out) return INVALID_ARGUMENT;
  CONSISTENT({ r = gpu->value[id].ret; if (!r) *out = gpu->value[id].value; });
  return r;
}
static nvmlReturn_t get_text(const char *text, char *out, unsigned size) {
  if (!out) return INVALID_ARGUMENT;
  if (!text[0]) return NOT_SUPPORTED;
  if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
  CONSISTENT({ snprintf(out, size, "%s", text); });
  return OK;
}

#define UINT_CALL(call, id) \
  nvmlReturn_t call(nvmlDevice_t device, unsigned *out) { GPU(call); return get_uint(gpu, id, out); }
#define ULL_CALL(call, id) \
  nvmlReturn_t call(nvmlDevice_t device, unsigned long long *out) { GPU(call); return get_ull(gpu, id, out); }
#define TEXT_CALL(call, member) \
  nvmlReturn_t call(nvmlDevice_t device, char *out, unsigned size) { GPU(call); return get_text(gpu->member, out, size); }

/* ---- library and devices ---- */

static nvmlReturn_t start(int call) {
  if (!state) return DRIVER_NOT_LOADED;
  nvmlReturn_t r = suffer(&state->fault[call]);
  if (r) return r;
  if (strncmp(loaded_version, state->kernel_version, sizeof loaded_version)) return LIB_RM_VERSION_MISMATCH;
  pthread_mutex_lock(&lock);
  if (!initialised || generation != state->generation) {
    CONSISTENT({
      slot_count = 0;
      for (int i = 0; i < MAX_GPUS; i++) if (state->gpu[i].present) slots[slot_count++] = i;
      generation = state->generation;
    });
    initialised = 0;
  }
  initialised++;
  pthread_mutex_unlock(&lock);
  return OK;
}
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return start(C_nvmlInitWithFlags); }
nvmlReturn_t nvmlInit_v2(void) { return start(C_nvmlInit_v2); }
nvmlReturn_t nvmlShutdown(void) {
  if (!state) return UNINITIALIZED;
  nvmlReturn_t r = suffer(&state->fault[C_nvmlShutdown]);
  if (r) return r;
  pthread_mutex_lock(&lock);
  r = initialised ? OK : UNINITIALIZED;
  if (initialised) initialised--;
  pthread_mutex_unlock(&lock);
  return r;
}
const char *nvmlErrorString(nvmlReturn_t r) {
  static __thread char text[40];
  snprintf(text, sizeof text, "simulated error %d", r);
  return text;
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
  nvmlReturn_t r = enter(C_nvmlSystemGetDriverVersion);
  return r ? r : get_text(state->kernel_version, out, size);
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned size) {
  nvmlReturn_t r = enter(C_nvmlSystemGetNVMLVersion);
  return r ? r : get_text(loaded_version, out, size);
}
#define CUDA_CALL(call) \
  nvmlReturn_t call(int *out) { nvmlReturn_t r = enter(C_##call); NEED(out); if (!r) *out = 12080; return r; }
CUDA_CALL(nvmlSystemGetCudaDriverVersion)
CUDA_CALL(nvmlSystemGetCudaDriverVersion_v2)
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *out) {
  nvmlReturn_t r = enter(C_nvmlDeviceGetCount_v2);
  NEED(out);
  if (!r) *out = (unsigned)slot_count;
  return r;
}
static nvmlReturn_t give_handle(int call, int slot, nvmlDevice_t *out) {
  nvmlDevice_t device = (nvmlDevice_t)(uintptr_t)(slot + 1);
  Gpu *gpu = &state->gpu[slot];
  nvmlReturn_t r = suffer(&gpu->fault[call]);
  if (r) return r;
  if (!gpu->present) return GPU_IS_LOST;
  if (gpu->error == GPU_IS_LOST) return GPU_IS_LOST;
  *out = device;
  return OK;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out) {
  nvmlReturn_t r = enter(C_nvmlDeviceGetHandleByIndex_v2);
  if (r) return r;
  NEED(out && index < (unsigned)slot_count);
  return give_handle(C_nvmlDeviceGetHandleByIndex_v2, slots[index], out);
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
  nvmlReturn_t r = enter(C_nvmlDeviceGetHandleByUUID);
  if (r) return r;
  NEED(uuid && out);
  for (int i = 0; i < slot_count; i++)
    if (!strcmp(state->gpu[slots[i]].uuid, uuid)) return give_handle(C_nvmlDeviceGetHandleByUUID, slots[i], out);
  return NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *out) {
  unsigned domain, bus, number;
  nvmlReturn_t r = enter(C_nvmlDeviceGetHandleByPciBusId_v2);
  if (r) return r;
  NEED(bus_id && out && sscanf(bus_id, "%x:%x:%x", &domain, &bus, &number) == 3);
  for (int i = 0; i < slot_count; i++) {
    Gpu *g = &state->gpu[slots[i]];
    if (g->domain == domain && g->bus == bus && g->device == number)
      return give_handle(C_nvmlDeviceGetHandleByPciBusId_v2, slots[i], out);
  }
  return NOT_FOUND;
}
static int index_of(Gpu *gpu) {
  for (int i = 0; i < slot_count; i++) if (&state->gpu[slots[i]] == gpu) return i;
  return -1;
}
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *out) {
  GPU(nvmlDeviceGetIndex);
  int i = index_of(gpu);
  NEED(out && i >= 0);
  *out = (unsigned)i;
  return OK;
}
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *out) {
  GPU(nvmlDeviceGetMinorNumber);
  NEED(out);
  *out = (unsigned)(gpu - state->gpu);
  return OK;
}
TEXT_CALL(nvmlDeviceGetName, name)
TEXT_CALL(nvmlDeviceGetUUID, uuid)
TEXT_CALL(nvmlDeviceGetSerial, serial)
TEXT_CALL(nvmlDeviceGetVbiosVersion, vbios)
TEXT_CALL(nvmlDeviceGetInforomImageVersion, inforom)
nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *out) {
  GPU(nvmlDeviceGetGspFirmwareVersion);
  return get_text(gpu->gsp_version, out, 0x40);
}
nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned *on, unsigned *by_default) {
  GPU(nvmlDeviceGetGspFirmwareMode);
  NEED(by_default);
  *by_default = 1;
  return get_uint(gpu, V_gsp_mode, on);
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, pci_info *out) {
  GPU(nvmlDeviceGetPciInfo_v3);
  NEED(out);
  memset(out, 0, sizeof *out);
  out->domain = gpu->domain;
  out->bus = gpu->bus;
  out->device = gpu->device;
  snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus, gpu->device);
  snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff,
           gpu->device & 0xff);
  return OK;
}

/* ---- readings ---- */

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *out) {
  GPU(nvmlDeviceGetTemperature);
  NEED(sensor == 0);
  return get_uint(gpu, V_temperature_c, out);
}
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, temperature_v1 *out) {
  GPU(nvmlDeviceGetTemperatureV);
  NEED(out);
  if (out->version != VERSION(temperature_v1, 1)) return ARGUMENT_VERSION_MISMATCH;
  NEED(out->sensor == 0);
  return get_uint(gpu, V_temperature_c, (unsigned *)&out->temperature);
}
nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned kind, unsigned *out) {
  GPU(nvmlDeviceGetTemperatureThreshold);
  NEED(kind < 4);
  return get_uint(gpu, V_threshold_shutdown_c + (int)kind, out);
}
nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, margin_v1 *out) {
  GPU(nvmlDeviceGetMarginTemperature);
  NEED(out);
  if (out->version != VERSION(margin_v1, 1)) return ARGUMENT_VERSION_MISMATCH;
  return get_uint(gpu, V_margin_c, (unsigned *)&out->margin);
}
UINT_CALL(nvmlDeviceGetPowerUsage, V_power_mw)
UINT_CALL(nvmlDeviceGetEnforcedPowerLimit, V_power_limit_mw)
UINT_CALL(nvmlDeviceGetPowerManagementLimit, V_power_limit_mw)
ULL_CALL(nvmlDeviceGetTotalEnergyConsumption, V_energy_mj)
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned kind, unsigned *out) {
  GPU(nvmlDeviceGetClockInfo);
  NEED(kind < 4);
  return get_uint(gpu, V_clock_graphics_mhz + (int)kind, out);
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned kind, unsigned *out) {
  GPU(nvmlDeviceGetMaxClockInfo);
  NEED(kind < 4);
  return get_uint(gpu, kind == 2 ? V_clock_max_memory_mhz : V_clock_max_sm_mhz, out);
}
UINT_CALL(nvmlDeviceGetPerformanceState, V_performance_state)
UINT_CALL(nvmlDeviceGetPowerState, V_performance_state)
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, utilization *out) {
  GPU(nvmlDeviceGetUtilizationRates);
  nvmlReturn_t r;
  NEED(out);
  CONSISTENT({
    r = gpu->value[V_utilization_gpu_pct].ret;
    out->gpu = (unsigned)gpu->value[V_utilization_gpu_pct].value;
    out->memory = (unsigned)gpu->value[V_utilization_memory_pct].value;
  });
  return r;
}
#define CODEC_CALL(call, id) \
  nvmlReturn_t call(nvmlDevice_t device, unsigned *out, unsigned *period_us) { \
    GPU(call); NEED(period_us); *period_us = 167000; return get_uint(gpu, id, out); }
CODEC_CALL(nvmlDeviceGetEncoderUtilization, V_utilization_encoder_pct)
CODEC_CALL(nvmlDeviceGetDecoderUtilization, V_utilization_decoder_pct)
UINT_CALL(nvmlDeviceGetNumFans, V_fans)
nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *out) {
  GPU(nvmlDeviceGetFanSpeed_v2);
  unsigned fans;
  nvmlReturn_t r = get_uint(gpu, V_fans, &fans);
  if (r) return r;
  NEED(out && fan < fans && fan < MAX_FANS);
  *out = gpu->fan_pct[fan];
  return OK;
}
nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *out) {
  GPU(nvmlDeviceGetFanSpeed);
  unsigned fans;
  nvmlReturn_t r = get_uint(gpu, V_fans, &fans);
  if (r) return r;
  NEED(out);
  *out = gpu->fan_pct[0];
  return OK;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, memory_v1 *out) {
  GPU(nvmlDeviceGetMemoryInfo);
  nvmlReturn_t r;
  NEED(out);
  CONSISTENT({ /* the old call counts what the driver keeps for itself as used */
    r = gpu->value[V_memory_total].ret;
    out->total = gpu->value[V_memory_total].value;
    out->used = gpu->value[V_memory_used].value + gpu->value[V_memory_reserved].value;
    out->free = out->total - out->used;
  });
  return r;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, memory_v2 *out) {
  GPU(nvmlDeviceGetMemoryInfo_v2);
  nvmlReturn_t r;
  NEED(out);
  if (out->version != VERSION(memory_v2, 2)) return ARGUMENT_VERSION_MISMATCH;
  CONSISTENT({
    r = gpu->value[V_memory_total].ret;
    out->total = gpu->value[V_memory_total].value;
    out->reserved = gpu->value[V_memory_reserved].value;
    out->used = gpu->value[V_memory_used].value;
    out->free = out->total - out->reserved - out->used;
  });
  return r;
}
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, bar1 *out) {
  GPU(nvmlDeviceGetBAR1MemoryInfo);
  NEED(out);
  out->total = 1ull << 37;
  out->used = 1ull << 20;
  out->free = out->total - out->used;
  return OK;
}
ULL_CALL(nvmlDeviceGetCurrentClocksEventReasons, V_clock_event_reasons)
ULL_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, V_clock_event_reasons)
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, field_value *out) {
  GPU(nvmlDeviceGetFieldValues);
  NEED(out && count > 0);
  if (gpu->field_limit) /* a driver that refuses the whole call for one field it does not know */
    for (int i = 0; i < count; i++) NEED(out[i].id < gpu->field_limit);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  CONSISTENT({
    for (int i = 0; i < count; i++) {
      field_value *f = &out[i];
      f->timestamp = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
      f->latency = 0;
      if (f->id >= MAX_FIELDS || f->scope >= MAX_LINKS) {
        f->ret = INVALID_ARGUMENT;
        continue;
      }
      Cell *cell = &gpu->field[f->scope][f->id];
      f->ret = cell->ret;
      f->type = cell->type;
      f->value = cell->value;
    }
  });
  return OK;
}

/* ---- memory health ---- */

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *now, unsigned *pending) {
  GPU(nvmlDeviceGetEccMode);
  nvmlReturn_t r = get_uint(gpu, V_ecc_mode, now);
  NEED(pending);
  if (!r) *pending = *now;
  return r;
}
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned counter, unsigned location,
                                             unsigned long long *out) {
  GPU(nvmlDeviceGetMemoryErrorCounter);
  nvmlReturn_t r;
  NEED(out && type < 2 && counter < 2 && location < ECC_LOCATIONS);
  CONSISTENT({ r = gpu->ecc[type][counter][location].ret; *out = gpu->ecc[type][counter][location].value; });
  return r;
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *out) {
  GPU(nvmlDeviceGetTotalEccErrors);
  int any = 0;
  NEED(out && type < 2 && counter < 2);
  CONSISTENT({
    *out = 0;
    for (int i = 0; i < ECC_LOCATIONS; i++)
      if (!gpu->ecc[type][counter][i].ret) { any = 1; *out += gpu->ecc[type][counter][i].value; }
  });
  return any ? OK : NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, sram_v1 *out) {
  GPU(nvmlDeviceGetSramEccErrorStatus);
  nvmlReturn_t r;
  NEED(out);
  if (out->version != VERSION(sram_v1, 1)) return ARGUMENT_VERSION_MISMATCH;
  CONSISTENT({
    r = gpu->value[V_sram_status].ret;
    out->agg_parity = gpu->value[V_sram_parity].value;
    out->agg_secded = gpu->value[V_sram_secded].value;
    out->agg_cor = gpu->ecc[0][1][7].value;
    out->vol_parity = out->vol_secded = out->vol_cor = 0;
    out->l2 = gpu->value[V_sram_bucket_l2].value;
    out->sm = gpu->value[V_sram_bucket_sm].value;
    out->pcie = gpu->value[V_sram_bucket_pcie].value;
    out->mcu = gpu->value[V_sram_bucket_mcu].value;
    out->other = gpu->value[V_sram_bucket_other].value;
    out->threshold = (unsigned)gpu->value[V_sram_threshold_exceeded].value;
  });
  return r;
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failed) {
  GPU(nvmlDeviceGetRemappedRows);
  nvmlReturn_t r;
  NEED(cor && unc && pending && failed);
  CONSISTENT({
    r = gpu->value[V_remap_corrected].ret;
    *cor = (unsigned)gpu->value[V_remap_corrected].value;
    *unc = (unsigned)gpu->value[V_remap_uncorrected].value;
    *pending = (unsigned)gpu->value[V_remap_pending].value;
    *failed = (unsigned)gpu->value[V_remap_failure].value;
  });
  return r;
}
nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, histogram *out) {
  GPU(nvmlDeviceGetRowRemapperHistogram);
  nvmlReturn_t r;
  NEED(out);
  CONSISTENT({
    r = gpu->value[V_banks_max].ret;
    out->max = (unsigned)gpu->value[V_banks_max].value;
    out->high = (unsigned)gpu->value[V_banks_high].value;
    out->partial = (unsigned)gpu->value[V_banks_partial].value;
    out->low = (unsigned)gpu->value[V_banks_low].value;
    out->none = (unsigned)gpu->value[V_banks_none].value;
  });
  return r;
}
nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device, unrepairable_v1 *out) {
  GPU(nvmlDeviceGetUnrepairableMemoryFlag_v1);
  NEED(out);
  if (out->version != VERSION(unrepairable_v1, 1)) return ARGUMENT_VERSION_MISMATCH;
  return get_uint(gpu, V_unrepairable_memory, &out->flag);
}
static nvmlReturn_t pages(Gpu *gpu, unsigned cause, unsigned *count, unsigned long long *addresses, unsigned long long *times) {
  unsigned have;
  if (cause > 1 || !count) return INVALID_ARGUMENT;
  nvmlReturn_t r = get_uint(gpu, cause ? V_retired_dbe : V_retired_sbe, &have);
  if (r) return r;
  if (*count < have || !addresses) {
    *count = have;
    return have ? INSUFFICIENT_SIZE : OK;
  }
  *count = have;
  for (unsigned i = 0; i < have; i++) {
    addresses[i] = 0x1000ull * (i + 1);
    if (times) times[i] = 1700000000ull;
  }
  return OK;
}
nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *addresses) {
  GPU(nvmlDeviceGetRetiredPages);
  return pages(gpu, cause, count, addresses, NULL);
}
nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *addresses,
                                          unsigned long long *times) {
  GPU(nvmlDeviceGetRetiredPages_v2);
  return pages(gpu, cause, count, addresses, times);
}
UINT_CALL(nvmlDeviceGetRetiredPagesPendingStatus, V_retired_pending)

/* ---- links and modes ---- */

UINT_CALL(nvmlDeviceGetPcieReplayCounter, V_pcie_replay)
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *out) {
  GPU(nvmlDeviceGetPcieThroughput);
  NEED(out && counter < 2);
  *out = 0; /* KB/s: nothing is sent here */
  return OK;
}
UINT_CALL(nvmlDeviceGetCurrPcieLinkGeneration, V_pcie_gen)
UINT_CALL(nvmlDeviceGetCurrPcieLinkWidth, V_pcie_width)
UINT_CALL(nvmlDeviceGetMaxPcieLinkGeneration, V_pcie_gen_max)
UINT_CALL(nvmlDeviceGetMaxPcieLinkWidth, V_pcie_width_max)
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *out) {
  GPU(nvmlDeviceGetNvLinkState);
  if (!gpu->links) return NOT_SUPPORTED;
  NEED(out && link < gpu->links);
  CONSISTENT({ *out = gpu->field[link][165].value != 0; });
  return OK;
}
nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, unsigned counter, unsigned long long *out) {
  GPU(nvmlDeviceGetNvLinkErrorCounter);
  static const int low[4] = {46, 53, 32, 39}, high[4] = {108, 114, 96, 102};
  if (!gpu->links) return NOT_SUPPORTED;
  NEED(out && link < gpu->links && counter < 4);
  if (link >= 12) return NOT_SUPPORTED;
  nvmlReturn_t r;
  int id = link < 6 ? low[counter] + (int)link : high[counter] + (int)link - 6;
  CONSISTENT({ r = gpu->field[0][id].ret; *out = gpu->field[0][id].value; });
  return r;
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, fabric_v3 *out) {
  GPU(nvmlDeviceGetGpuFabricInfoV);
  nvmlReturn_t r;
  NEED(out);
  unsigned version = out->version, newest = (unsigned)gpu->value[V_fabric_versions].value;
  int v3 = version == VERSION(fabric_v3, 3) && newest >= 3;
  if (!v3 && version != (36u | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
  CONSISTENT({
    r = gpu->value[V_fabric_state].ret;
    out->state = (unsigned)gpu->value[V_fabric_state].value;
    out->status = (nvmlReturn_t)gpu->value[V_fabric_status].value;
    out->mask = (uint32_t)gpu->value[V_fabric_health_mask].value;
    if (v3) out->summary = (uint8_t)gpu->value[V_fabric_health_summary].value;
  });
  return r;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending) {
  GPU(nvmlDeviceGetMigMode);
  nvmlReturn_t r = get_uint(gpu, V_mig_mode, now);
  NEED(pending);
  if (!r) *pending = *now;
  return r;
}
UINT_CALL(nvmlDeviceGetPersistenceMode, V_persistence)
UINT_CALL(nvmlDeviceGetComputeMode, V_compute_mode)
static nvmlReturn_t processes(Gpu *gpu, unsigned *count, process_v2 *out) {
  nvmlReturn_t r = gpu->value[V_process_list].ret;
  if (r) return r;
  NEED(count);
  CONSISTENT({
    unsigned have = gpu->processes < MAX_PROCESSES ? gpu->processes : MAX_PROCESSES;
    r = have > *count || !out ? INSUFFICIENT_SIZE : OK;
    if (!have) r = OK;
    if (!r) for (unsigned i = 0; i < have; i++)
      out[i] = (process_v2){gpu->process[i].pid, gpu->process[i].used, 0xFFFFFFFFu, 0xFFFFFFFFu};
    *count = have;
  });
  return r;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_v2 *out) {
  GPU(nvmlDeviceGetComputeRunningProcesses_v3);
  return processes(gpu, count, out);
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_v2 *out) {
  GPU(nvmlDeviceGetGraphicsRunningProcesses_v3);
  NEED(count);
  (void)out;
  *count = 0;
  return gpu->value[V_process_list].ret;
}

/* ---- events ---- */

typedef struct { uint64_t next; uint64_t mask[MAX_GPUS]; } EventSet;

ULL_CALL(nvmlDeviceGetSupportedEventTypes, V_event_types)
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out) {
  nvmlReturn_t r = enter(C_nvmlEventSetCreate);
  if (r) return r;
  NEED(out);
  EventSet *set = calloc(1, sizeof *set);
  NEED(set);
  set->next = __atomic_load_n(&state->events, __ATOMIC_ACQUIRE); /* what came before is missed, as on a real driver */
  *out = set;
  return OK;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
  GPU(nvmlDeviceRegisterEvents);
  unsigned long long known;
  nvmlReturn_t r = get_ull(gpu, V_event_types, &known);
  if (r) return r;
  if (types & ~known) return NOT_SUPPORTED;
  ((EventSet *)set)->mask[gpu - state->gpu] |= types;
  return OK;
}
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t handle, event_data *out, unsigned timeout_ms) {
  EventSet *set = handle;
  NEED(set && out);
  for (unsigned waited = 0;; waited += 20) {
    nvmlReturn_t r = waited ? OK : enter(C_nvmlEventSetWait_v2);
    if (r) return r;
    if (generation != state->generation) return UNINITIALIZED;
    uint64_t end = __atomic_load_n(&state->events, __ATOMIC_ACQUIRE);
    if (end - set->next > MAX_EVENTS) set->next = end - MAX_EVENTS;
    while (set->next < end) {
      Happening *h = &state->event[set->next++ % MAX_EVENTS];
      if (h->slot < MAX_GPUS && !(set->mask[h->slot] & h->type)) continue;
      *out = (event_data){(nvmlDevice_t)(uintptr_t)(h->slot + 1), h->type, h->data, h->gpu_instance, h->compute_instance};
      return OK;
    }
    if (waited >= timeout_ms) return TIMEOUT;
    nap(20000);
  }
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
  nvmlReturn_t r = enter(C_nvmlEventSetFree);
  free(set);
  return r;
}
