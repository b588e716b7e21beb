// Gymnasium's Pendulum-v1 as a client in C++; at the end it prints what it counted, in one line.
//
//   g++ -std=c++17 -O2 -ffp-contract=off -o pendulum pendulum.cpp && ./pendulum --num-envs 16 --url ws://127.0.0.1:8000
//
// docs/cpp-client.md walks through it.
#include <memory>
#include <utility>

#include "command_line.hpp"
#include "pendulum_env.hpp"
#include "plugrl_client.hpp"

int main(int argc, char** argv) {
    command_line::Arguments arguments = command_line::parse(argc, argv);
    plugrl::Envs envs;
    for (long i = 0; i < arguments.num_envs; ++i) envs.push_back(std::make_unique<Pendulum>());
    return command_line::serve(std::move(arguments.options), std::move(envs));
}
