// What the kernels ask of a CUDA build of torch, answered for the host: its tensors pass for CUDA's.
// A number of multiprocessors is a device of its own, since a kernel asks once for each device.
#pragma once

extern "C" {

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = host::multiprocessors;
  return 0;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return 0;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
}
