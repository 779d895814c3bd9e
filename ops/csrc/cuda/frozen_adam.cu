// frozen_adam_ on CUDA: see ops/kernels/frozen_adam.py for the definition and formulas.h for one element.
#include "one_pass.cuh"

namespace xds {

void frozen_adam_(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, MaybeTensor out, MaybeTensor scale,
    MaybeTensor found_inf, double rate, double beta1, double root, double eps, double decay, double limit,
    bool is_momentum, bool takes_edits, MaybeTensor old_param, MaybeTensor old_exp_avg, MaybeTensor old_exp_avg_sq) {
  refuse_old("frozen_adam_", param, {&old_param, &old_exp_avg, &old_exp_avg_sq});
  launch_one_pass<WideParams>(
      "frozen_adam_", FrozenAdam(rate, beta1, root, eps, decay, limit, is_momentum), param, grad,
      {exp_avg, exp_avg_sq}, {"exp_avg", "exp_avg_sq"}, out, std::nullopt, scale, found_inf, takes_edits);
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) { m.impl("frozen_adam_", TORCH_BOX(&xds::frozen_adam_)); }
