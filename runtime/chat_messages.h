// Checks of a request's `messages` and `tools` before they are rendered: what the template would
// leave out without a word is refused here.
// Threads: pure functions.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/request.h"

namespace colibri {

// Why a line is refused. Thrown and caught while one line is read, never further.
// Message and param are cut where they repeat too much of the line: each line under way may have
// one.
struct LineRefusal {
  static constexpr size_t kMaxText = 1000;
  LineRefusal(std::string code, std::string param, std::string message);
  LineError error;
};

// The messages as the template knows them: `developer`, another word for system, has become system.
// They must be an array of at least one object with such a role (system, user, assistant, tool),
// fields it renders, parts of types it knows, and content except the assistant's. What is inside is
// RenderChat's to check. Throws LineRefusal with the place ("messages[2]").
nlohmann::ordered_json CheckedMessages(nlohmann::ordered_json messages);

// `tools` must be an array of functions with names. Throws LineRefusal.
void CheckTools(const nlohmann::ordered_json& tools);

// A warning for each message with parts that the model cannot take in, naming the first: the
// template puts a reminder in their place. Messages that CheckMessages accepts.
std::vector<std::string> MediaWarnings(const nlohmann::ordered_json& messages);

// The text of the last user message, its parts put together; "" without one.
std::string LastUserText(const nlohmann::ordered_json& messages);

}  // namespace colibri
