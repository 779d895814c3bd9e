// sgd_ on CUDA: see ops/kernels/sgd.py for the definition and formulas.h for one element.
#include "one_pass.cuh"

namespace xds {

void sgd_(
    Tensor param, Tensor grad, MaybeTensor momentum_buffer, MaybeTensor out, Tensor step,
    MaybeTensor scale, MaybeTensor found_inf, double lr, double momentum, double dampening,
    double weight_decay, bool nesterov, bool takes_edits,
    MaybeTensor old_param, MaybeTensor old_momentum_buffer) {
  refuse_old("sgd_", param, {&old_param, &old_momentum_buffer});
  const float rate = static_cast<float>(lr), l2 = static_cast<float>(weight_decay);
  if (!momentum_buffer.has_value()) {
    Checks("sgd_", "param", param).that(momentum == 0.0, "momentum needs a momentum_buffer; it is None");
    launch_one_pass<WideParams>(
        "sgd_", Sgd{rate, l2}, param, grad, {std::nullopt, std::nullopt}, {"", ""}, out, step, scale,
        found_inf, takes_edits);
    return;
  }
  const SgdMomentum rule = {
      rate, static_cast<float>(momentum), static_cast<float>(1.0 - dampening), l2, nesterov};
  launch_one_pass<WideParams>(
      "sgd_", rule, param, grad, {momentum_buffer, std::nullopt}, {"momentum_buffer", ""}, out, step,
      scale, found_inf, takes_edits);
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) { m.impl("sgd_", TORCH_BOX(&xds::sgd_)); }
