// colibri-run: a prompt file in, exact answers out.
#include <string>
#include <vector>

#include "apps/flags.h"
#include "apps/run.h"
#include "apps/say.h"

int main(int argc, char** argv) {
  return colibri::WithExitCodes("colibri-run", [&] {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    const colibri::ParsedCommandLine line = colibri::ParseRunCommandLine(arguments);
    if (!line.options) {
      line.exit_code == 0 ? colibri::Print(line.text) : colibri::SayPart(line.text);
      return line.exit_code;
    }
    if (line.options->version) {
      colibri::Print(colibri::VersionText());
      return 0;
    }
    return colibri::RunPrompts(*line.options);
  });
}
