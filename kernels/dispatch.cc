// Chooses the SIMD target. For now every kernel is its scalar reference.
#include "kernels/kernels.h"

namespace colibri {

void Matmul(const PackedMatrix& w, int32_t first, int32_t last, const float* x, size_t x_stride,
            size_t rows, float* y, size_t y_stride) {
  scalar::Matmul(w, first, last, x, x_stride, rows, y, y_stride);
}
void MatmulTransposed(const PackedMatrix& w, int32_t first, int32_t last, const float* x,
                      size_t x_stride, size_t rows, float* y, size_t y_stride) {
  scalar::MatmulTransposed(w, first, last, x, x_stride, rows, y, y_stride);
}
void DequantiseRow(const PackedMatrix& w, int32_t row, float* y) {
  scalar::DequantiseRow(w, row, y);
}
void RmsNorm(const float* x, const float* w, size_t n, float eps, float* y) {
  scalar::RmsNorm(x, w, n, eps, y);
}
void LayerNorm(const float* x, const float* w, const float* b, size_t n, float eps, float* y) {
  scalar::LayerNorm(x, w, b, n, eps, y);
}
void Rope(float* x, const float* cos, const float* sin, size_t pairs) {
  scalar::Rope(x, cos, sin, pairs);
}
void SiluMul(const float* gate, const float* up, size_t n, float* y) {
  scalar::SiluMul(gate, up, n, y);
}
void AddScaled(float a, const float* x, size_t n, float* y) { scalar::AddScaled(a, x, n, y); }
void StoreKv(const float* x, size_t n, KvType type, std::byte* dst) {
  scalar::StoreKv(x, n, type, dst);
}
void IndexScores(const KvView& keys, int32_t heads, const float* q, const float* w, float scale,
                 int32_t first, int32_t last, float* scores) {
  scalar::IndexScores(keys, heads, q, w, scale, first, last, scores);
}
void AttendLatents(const LatentAttention& a, int32_t first_head, int32_t last_head) {
  scalar::AttendLatents(a, first_head, last_head);
}
bool AllFinite(const float* x, size_t n) { return scalar::AllFinite(x, n); }
double LogSumExp(const float* x, size_t n) { return scalar::LogSumExp(x, n); }

std::string SimdTarget() { return "SCALAR"; }
std::vector<std::string> SimdTargets() { return {"SCALAR"}; }
void ForceSimdTarget(const std::string&) {}

}  // namespace colibri
