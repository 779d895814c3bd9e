// adam_ on CUDA: see ops/kernels/adam.py for the definition and formulas.h for one element.
#include "coded.cuh"

namespace xds {

void adam_(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, MaybeTensor out, Tensor step,
    MaybeTensor scale, MaybeTensor found_inf, double lr, double beta1, double beta2, double eps,
    double weight_decay, bool decoupled, bool bias_correction, bool takes_edits,
    MaybeTensor old_param, MaybeTensor old_exp_avg, MaybeTensor old_exp_avg_sq,
    MaybeTensor draws, MaybeTensor low, bool rounds_away) {
  refuse_old("adam_", param, {&old_param, &old_exp_avg, &old_exp_avg_sq});
  const Moments moments(beta1, beta2, eps, bias_correction);
  const Adam rule(lr, moments, weight_decay, decoupled);
  auto launch = has_rows(exp_avg) ? launch_rows<AnyParams, Adam> : launch_one_pass<AnyParams, Adam>;
  if (low.has_value())
    launch = has_rows(exp_avg) ? launch_rows<SplitParams, Adam> : launch_one_pass<SplitParams, Adam>;
  launch(
      "adam_", rule, param, grad, {exp_avg, exp_avg_sq}, {"exp_avg", "exp_avg_sq"}, out, step, scale,
      found_inf, takes_edits, draws, {low, rounds_away});
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) { m.impl("adam_", TORCH_BOX(&xds::adam_)); }
