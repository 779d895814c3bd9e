// lion_ on CUDA: see ops/kernels/lion.py for the definition and formulas.h for one element.
#include "coded.cuh"

namespace xds {

void lion_(
    Tensor param, Tensor grad, Tensor exp_avg, MaybeTensor out, MaybeTensor scale, MaybeTensor found_inf,
    double lr, double beta1, double beta2, double weight_decay, bool takes_edits,
    MaybeTensor old_param, MaybeTensor old_exp_avg, MaybeTensor step, MaybeTensor draws, MaybeTensor low,
    bool rounds_away) {
  refuse_old("lion_", param, {&old_param, &old_exp_avg});
  auto launch = has_rows(exp_avg) ? launch_rows<AnyParams, Lion> : launch_one_pass<AnyParams, Lion>;
  if (low.has_value())
    launch = has_rows(exp_avg) ? launch_rows<SplitParams, Lion> : launch_one_pass<SplitParams, Lion>;
  launch(
      "lion_", Lion(lr, beta1, beta2, weight_decay), param, grad, {exp_avg, std::nullopt},
      {"exp_avg", ""}, out, step, scale, found_inf, takes_edits, draws, {low, rounds_away});
}

}  // namespace xds

STABLE_TORCH_LIBRARY_IMPL(xds, CUDA, m) { m.impl("lion_", TORCH_BOX(&xds::lion_)); }
