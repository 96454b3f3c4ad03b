// NVIDIA's libnvidia-ml.so.1 without a GPU. $FAKE_NVML is a folder; its file gpu0 has lines `key value`, of gpu1 and so
// on too. A key that is missing is not supported, and a value of -1 is an error of the driver.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };
typedef struct { int index; } Device;
static Device devices[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static double last_xid[8];

static FILE *open_gpu(int index) {
  char path[4096];
  snprintf(path, sizeof path, "%s/gpu%d", getenv("FAKE_NVML"), index);
  return fopen(path, "r");
}

static int value(Device *device, const char *key, double *out) {
  FILE *file = open_gpu(device->index);
  char name[64];
  double found;
  int result = NOT_SUPPORTED;
  if (!file) return GPU_IS_LOST;
  while (fscanf(file, "%63s %lf", name, &found) == 2)
    if (!strcmp(name, key)) { *out = found; result = found < 0 ? GPU_IS_LOST : SUCCESS; }
  fclose(file);
  return result;
}

static int whole(Device *device, const char *key, unsigned *out) {
  double found;
  int result = value(device, key, &found);
  if (result == SUCCESS) *out = (unsigned)found;
  return result;
}

static int wide(Device *device, const char *key, unsigned long long *out) {
  double found;
  int result = value(device, key, &found);
  if (result == SUCCESS) *out = (unsigned long long)found;
  return result;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return getenv("FAKE_NVML") ? SUCCESS : 9; }
const char *nvmlErrorString(int result) { return result == NOT_SUPPORTED ? "Not Supported" : "GPU is lost"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  FILE *file;
  for (*count = 0; *count < 8 && (file = open_gpu(*count)); ++*count) fclose(file);
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) { *device = &devices[index]; return SUCCESS; }

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
  double ignored;
  if (value(device, "uuid", &ignored) == GPU_IS_LOST) return GPU_IS_LOST;
  return snprintf(uuid, size, "GPU-fake-%d", device->index) < (int)size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
  (void)device;
  return snprintf(name, size, "NVIDIA H100 80GB HBM3") < (int)size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *mhz) {
  return type == 1 ? whole(device, "sm_clock", mhz) : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
  return sensor == 0 ? whole(device, "temperature", celsius) : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) { return whole(device, "milliwatts", milliwatts); }

int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *millijoules) {
  return wide(device, "millijoules", millijoules);
}

typedef struct { unsigned gpu, memory; } Use;
int nvmlDeviceGetUtilizationRates(Device *device, Use *use) { use->memory = 0; return whole(device, "use", &use->gpu); }

typedef struct { unsigned long long total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
  int result = wide(device, "memory_used", &memory->used);
  memory->total = 80ull << 30;
  memory->free = memory->total - memory->used;
  return result;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *count) {
  return type == 1 && counter == 0 ? wide(device, "ecc", count) : NOT_SUPPORTED;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
  *correctable = *pending = *failed = 0;
  return whole(device, "remapped", uncorrectable);
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *is_active) {
  unsigned links, down;
  int result = whole(device, "links", &links);
  if (result == SUCCESS) result = link < links ? whole(device, "links_down", &down) : INVALID_ARGUMENT;
  if (result == SUCCESS) *is_active = link >= down;
  return result;
}

int nvmlDeviceGetNvLinkErrorCounter(Device *device, unsigned link, int counter, unsigned long long *count) {
  *count = link;  // only recoveries: 0, 1, 2 ... of the links
  return counter == 1 ? SUCCESS : NOT_SUPPORTED;
}

static int is_registered[8];
int nvmlEventSetCreate(void **set) { *set = is_registered; return SUCCESS; }

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, void *set) {
  double ignored;
  (void)set;
  is_registered[device->index] = types == 8 && value(device, "xid", &ignored) == SUCCESS;
  return is_registered[device->index] ? SUCCESS : NOT_SUPPORTED;
}

typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
  (void)set;
  for (unsigned waited = 0; waited < milliseconds; waited += 50, usleep(50000))
    for (int index = 0; index < 8; ++index) {
      double xid;
      if (!is_registered[index] || value(&devices[index], "xid", &xid) != SUCCESS || xid == last_xid[index]) continue;
      last_xid[index] = xid;
      *event = (Event){&devices[index], 8, (unsigned long long)xid, 0, 0};
      return SUCCESS;
    }
  return TIMEOUT;
}
