"""A tiny policy that plays the coin game: not well, so that there is something to learn.

A random model never guesses a number, so every group would be constant. This one (a two-layer Llama with
a word tokenizer and a chat template) is shown some scripted games first, a few seconds' work.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envs.coin import Coin, CoinTasks

MOST = 20
SPECIAL = ("<pad>", "<unk>", "<u>", "<a>", "<end>")
WORDS = "A purse holds to coins . How many ? You have guesses Answer with a number higher lower Right !"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<u> {{ m['content'] }} "
    "{% else %}<a> {{ m['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)


def make_player(folder: Path, steps: int = 120, seed: int = 0) -> Path:
    """Write model and tokenizer to ``folder`` in Hugging Face layout; ``steps`` 0 leaves it random."""
    words = [*SPECIAL, *(str(number) for number in range(MOST + 12)), *WORDS.split()]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            eos_token_id=vocabulary["<end>"],
            pad_token_id=vocabulary["<pad>"],
            bos_token_id=None,
            tie_word_embeddings=True,
        )
    )
    _show_games(model, core, steps, random.Random(seed))
    model.save_pretrained(folder)
    return folder


def _show_games(model: LlamaForCausalLM, core: Tokenizer, steps: int, chance: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        ids, labels = _batch(core, [_game(chance) for _ in range(24)])
        loss = model(ids, labels=labels, attention_mask=(ids != 0).long()).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def _game(chance: random.Random) -> str:
    """One game as text: the middle of what is still possible, or anything that is."""
    env = Coin(MOST)
    task = CoinTasks(MOST).task("train", chance.randrange(10**6))
    text, low, high = f"<u> {env.start(task, 0)}", 1, MOST
    while True:
        guess = (low + high) // 2 if chance.random() < 0.6 else chance.randint(low, high)
        text += f" <a> {guess}<end>"
        result = env.step([str(guess)])
        if result.done:
            return text
        text += f"<u> {result.observation}"
        if result.observation == "higher":
            low = min(max(low, guess + 1), MOST)
        else:
            high = max(min(high, guess - 1), 1)
        low, high = min(low, high), max(low, high)


def _batch(core: Tokenizer, games: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids [B, T] and labels [B, T]: -100 but for the guesses and the ends of turns."""
    rows = [core.encode(game).ids for game in games]
    width = max(map(len, rows))
    ids = torch.zeros((len(rows), width), dtype=torch.int64)
    labels = torch.full((len(rows), width), -100)
    ask = core.token_to_id("<a>")
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        for place, token in enumerate(row):
            if token == ask:
                labels[number, place + 1 : place + 3] = torch.tensor(row[place + 1 : place + 3])
    return ids, labels
