// What a layer needs besides its experts and does not always have in memory: KV pages, dense
// weights. A supplier reads it ahead and lets a frame wait for what is not there yet.
//
// For a frame and each of its layers the calls are, in this order: Prepare, Await, Begin, Attended,
// Left; Prepare of a layer comes while the layer before it is worked on. Threads: all calls about a
// frame come from its owner, those about several frames from several threads at once; what Start
// is given may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>

#include "runtime/frame.h"

namespace colibri {

class LayerSupplier {
 public:
  // What `frame` awaits for `layer` is there, or cannot be had.
  using Arrived = std::function<void(uint16_t frame, int32_t layer)>;

  virtual ~LayerSupplier() = default;
  // Once, before everything else.
  virtual void Start(Arrived arrived) = 0;
  // The frame is about to compute attention of layer - 1, or it has just been filled and `layer` is
  // 0. `layer` may be the number of layers: after this one the MTP layer comes, once or several
  // times, or a sweep begins.
  virtual void Prepare(Frame& frame, int32_t layer) = 0;
  // True: all that the layer needs is there. False: `arrived` is called once for it, perhaps before
  // this returns; from then on the frame may be somebody else's.
  virtual bool Await(Frame& frame, int32_t layer) = 0;
  // Attention begins: rows that miss something are marked now.
  virtual void Begin(Frame& /*frame*/, int32_t /*layer*/) {}
  // Attention has ended: the rows' keys are stored.
  virtual void Attended(Frame& /*frame*/, int32_t /*layer*/) {}
  // The frame goes on to the next layer, or to the head.
  virtual void Left(Frame& /*frame*/, int32_t /*layer*/) {}
};

}  // namespace colibri
