// The tokenizer of the fixtures, loaded once a program.
#pragma once

#include "runtime/tokenizer.h"

namespace colibri {

inline const Tokenizer& Tok() {
  static const Tokenizer tokenizer =
      Tokenizer::Load(COLIBRI_SOURCE_DIR "/tests/fixtures/tokenizer/tokenizer.json");
  return tokenizer;
}

}  // namespace colibri
