#include "model/product_kernels-inl.h"

namespace gannet {
inline namespace v0 {

const ProductKernels kPortableProducts = {"portable", [] { return true; }, transposed, plain, widen_bf16, widen_e4m3};

}  // namespace v0
}  // namespace gannet
