// adagrad_ on CUDA: see ops/kernels/adagrad.py for the definition and formulas.h for one element.
#include "one_pass.cuh"

namespace xds {

void adagrad_(
    Tensor param, Tensor grad, Tensor state_sum, MaybeTensor out, Tensor step, MaybeTensor scale,
    MaybeTensor found_inf, double lr, double lr_decay, double eps, double weight_decay, bool takes_edits,
    MaybeTensor old_param, MaybeTensor old_state_sum) {
  refuse_old("adagrad_", param, {&old_param, &old_state_sum});
  const Adagrad rule = {lr, lr_decay, static_cast<float>(eps), static_cast<float>(weight_decay)};
  launch_one_pass<WideParams>(
      "adagrad_", rule, param, grad, {state_sum, std::nullopt}, {"state_sum", ""}, out, step, scale,
      found_inf, takes_edits);
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) { m.impl("adagrad_", TORCH_BOX(&xds::adagrad_)); }
