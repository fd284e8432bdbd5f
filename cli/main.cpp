// The `neap` command: reads the command line, calls the library, turns errors into one line and an exit code.
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>

#include "cli/checkpoint_command.h"
#include "cli/exit_codes.h"
#include "cli/inspect_command.h"
#include "cli/overrides.h"
#include "cli/rank_label.h"
#include "cli/terminal_log.h"
#include "cli/train_command.h"
#include "neap/base/error.h"
#include "neap/comm/failure.h"
#include "neap/train/schema.h"

namespace neap::cli {
namespace {

// What CLI11 did not know, as an error that helps.
[[noreturn]] void throw_unknown_argument(const std::string& argument) {
  if (!argument.starts_with("--")) NEAP_USER_ERROR("unexpected argument ", argument);
  const std::string name = argument.substr(2, argument.find('=') - 2);
  NEAP_USER_ERROR("unknown option --", name, "; nearest key of the run file: --", train::nearest_key(name), "=…");
}

struct CheckpointCommands {
  std::string dir, out;
  CLI::App *verify, *convert;

  explicit CheckpointCommands(CLI::App& app) {
    CLI::App* both = app.add_subcommand("checkpoint", "what to do with the checkpoints of a run");
    both->require_subcommand(1);
    verify = both->add_subcommand("verify", "read all of a checkpoint, or of each one in a directory");
    convert = both->add_subcommand("convert", "write the model of a checkpoint as a Hugging Face directory");
    for (CLI::App* command : {verify, convert}) {
      command->add_option("DIR", dir, "a checkpoint, or a directory of them")->required();
    }
    convert->add_option("OUT", out, "the directory to write, which must not be there yet")->required();
  }
  CheckpointCommands(const CheckpointCommands&) = delete;
  CheckpointCommands& operator=(const CheckpointCommands&) = delete;
};

int dispatch(int argc, const char* const* argv) {
  const CommandLine command_line = split_command_line(argc, argv);
  CLI::App app("Trains models that do not fit: the memory engine Neaptide.", "neap");
  app.set_version_flag("--version", "neap " NEAP_VERSION);
  app.require_subcommand(1);

  TrainArguments arguments;
  CLI::App* train_app = app.add_subcommand("train", "train or fine-tune a model as a run file says");
  train_app->add_option("FILE", arguments.file, "run file (YAML); any of its keys may be given as --section.key=value")
      ->required();
  train_app->add_flag("--dry-run", arguments.dry_run,
                      "check everything, load the model, print the configuration; no step");
  train_app->allow_extras();
  train_app->footer([] {
    return "Keys of the run file, with [defaults]:\n" + train::help_text() + "\nExit codes: " + kExitCodesHelp;
  });
  std::string directory;
  CLI::App* inspect_app =
      app.add_subcommand("inspect", "say what a model directory holds: layers, and parameters and bytes by kind");
  inspect_app->add_option("DIR", directory, "Hugging Face directory: config.json and safetensors")->required();
  const CheckpointCommands checkpoint(app);
  CLI::App* doc_app = app.add_subcommand("config-doc", "print docs/config.md, the page about run files");

  std::vector<std::string> reversed(command_line.arguments.rbegin(), command_line.arguments.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    NEAP_USER_ERROR(error.what(), "; neap --help says more");
  }
  NEAP_CHECK(train_app->parsed() || command_line.overrides.empty(),
             "expected keys of a run file with neap train alone; found --",
             command_line.overrides.empty() ? "" : command_line.overrides.front().first);
  if (inspect_app->parsed()) return inspect(directory);
  if (doc_app->parsed()) {
    std::cout << train::markdown_page() << "\n## Exit codes of `neap train`\n\n" << kExitCodesHelp << '\n';
    return kOk;
  }
  if (checkpoint.verify->parsed()) return verify_checkpoint(checkpoint.dir);
  if (checkpoint.convert->parsed()) return convert_checkpoint(checkpoint.dir, checkpoint.out);
  for (const std::string& extra : train_app->remaining()) throw_unknown_argument(extra);
  arguments.overrides = command_line.overrides;
  return train(arguments);
}

int guarded(int argc, const char* const* argv) {
  const std::string label = rank_label();
  log_to_standard_error(label);
  // One write: ranks share the stream.
  const auto print = [&](const char* kind, const std::string& text) {
    std::cerr << "neap: " + label + kind + ": " + text + '\n';
  };
  try {
    return dispatch(argc, argv);
  } catch (const UserError& error) {
    print("error", error.what());
    return kUserError;
  } catch (const comm::RankFailure& error) {
    print("error", error.what());
    return kRankFailed;
  } catch (const OutOfMemory& error) {
    print("out of memory", error.what());
    return kOutOfMemory;
  } catch (const std::filesystem::filesystem_error& error) {  // what the system refuses is no bug of ours
    print("error", error.what());
    return kUserError;
  } catch (const c10::Error& error) {
    print("internal error", error.what_without_backtrace());
  } catch (const std::exception& error) {
    print("internal error", error.what());
  }
  return kInternalError;
}

}  // namespace
}  // namespace neap::cli

int main(int argc, char** argv) { return neap::cli::guarded(argc, argv); }
