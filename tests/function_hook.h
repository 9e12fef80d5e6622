// A stage hook from a function.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "runtime/stages.h"

namespace colibri {

class FunctionHook final : public StageHook {
 public:
  using Function = std::function<void(StagePoint, Frame&, int32_t layer)>;
  explicit FunctionHook(Function function) : function_(std::move(function)) {}
  void At(StagePoint point, Frame& frame, int32_t layer) override {
    if (function_) function_(point, frame, layer);
  }

 private:
  Function function_;
};

}  // namespace colibri
