// What memory gives: STREAM's triad, with plain and with non-temporal stores, and a loop that moves what AdamW
// moves (four arrays read, three of them written) with next to no arithmetic.
//
// `stream NUMEL SMALL|HUGE` allocates four arrays of NUMEL floats; each line on stdin names a loop, the answer is
// its seconds. Threads: OMP_NUM_THREADS. Build: g++ -O3 -march=native -fopenmp -ffast-math -fno-tree-loop-distribute-patterns.
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include <immintrin.h>

namespace {

constexpr int64_t LINE = 16;  // floats of a cache line

float* allocate(int64_t numel, bool huge) {
  void* memory = mmap(nullptr, numel * sizeof(float), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  madvise(memory, numel * sizeof(float), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return static_cast<float*>(memory);
}

// STREAM has doubles: two floats' room each, so the arrays are as large as AdamW's
void triad(double* __restrict a, const double* __restrict b, const double* __restrict c, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) a[i] = b[i] + 3.0 * c[i];
}

void triad_non_temporal(double* a, const double* b, const double* c, int64_t n) {
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i += LINE / 2) {
#if defined(__AVX512F__)
      const __m512d sum = _mm512_fmadd_pd(_mm512_set1_pd(3.0), _mm512_loadu_pd(c + i), _mm512_loadu_pd(b + i));
      _mm512_stream_pd(a + i, sum);
#else
      for (int64_t k = i; k < i + LINE / 2; k += 2)
        _mm_stream_pd(a + k, _mm_add_pd(_mm_loadu_pd(b + k), _mm_mul_pd(_mm_set1_pd(3.0), _mm_loadu_pd(c + k))));
#endif
    }
    _mm_sfence();
  }
}

void update(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    m[i] = 0.9f * m[i] + 0.1f * g[i];
    v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
    p[i] -= 1e-6f * (m[i] + v[i]);
  }
}

void first_touch(float* memory, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) memory[i] = 1.0f;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int64_t numel = std::atoll(argv[1]) / LINE * LINE;
  float* arrays[4];
  for (float*& array : arrays) first_touch(array = allocate(numel, !std::strcmp(argv[2], "HUGE")), numel);
  double* a = reinterpret_cast<double*>(arrays[0]);
  const double* b = reinterpret_cast<double*>(arrays[1]);
  const double* c = reinterpret_cast<double*>(arrays[2]);
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::string name; std::getline(std::cin, name);) {
    const auto start = std::chrono::steady_clock::now();
    if (name == "triad") {
      triad(a, b, c, numel / 2);
    } else if (name == "triad_non_temporal") {
      triad_non_temporal(a, b, c, numel / 2);
    } else if (name == "update") {
      update(arrays[0], arrays[1], arrays[2], arrays[3], numel);
    } else {
      return 3;
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    std::printf("%.9f\n", taken.count());
    std::fflush(stdout);
  }
}
