"""Let a trained run write: python examples/gpt/sample.py gpt-1 --prompt "ROMEO:" """

import argparse

import torch

import shoal


@torch.no_grad()
def write(model, prompt, length, temperature):
    text = list(prompt.encode())
    for _ in range(length):
        recent = torch.tensor([text[-model.context :]])
        chances = torch.softmax(model(recent)[0, -1] / temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1)))
    return bytes(text).decode(errors="replace")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?", default="last", help="a run's name or path; the last one if none is given")
    parser.add_argument("--runs", default="runs", help="where runs are kept")
    parser.add_argument("--prompt", default="\n")
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    print(write(shoal.load(args.run, runs=args.runs), args.prompt, args.length, args.temperature))
