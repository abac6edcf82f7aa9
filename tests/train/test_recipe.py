"""A recipe's file: what it may say, what is said of a wrong one, and what small scales keep."""

import math
import os
from dataclasses import replace

import pytest

from crosslayer.data.prepared import prepare_corpus
from crosslayer.train.recipe import Arm, Recipe, load_recipe
from crosslayer.train.settings import CHANGEABLE_OPTIONS, GROUP_OF_OPTION, Settings
from crosslayer.train.task import load_texts

# nine aliases of nine aliases of …: 9⁹ items
BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{former}'] * 9)}]\n"
    for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def written(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("layer: 3", "unknown option 'layer' (did you mean 'layers'?)"),
        ("layers: many", "layers must be a whole number, got 'many'"),
        ("layers: 0", "layers must be a whole number of at least 1, got 0"),
        ("- prenorm", "not a recipe, which is a mapping of options and `arms`"),
        ("", "not a recipe"),
        ("arms: [mud]", "unknown connection 'mud' (did you mean 'mudd'?)"),
        ("arms: [{name: x}]", "an arm needs a connection"),
        ("arms: [{connection: mudd, learning_rate: 3}]", "unknown key 'learning_rate' of an arm"),
        ("arms: [{connection: mudd, parameter: 3}]", "(did you mean 'parameters'?)"),
        ("arms: [mudd, {name: mudd, connection: hyper}]", "two arms are called 'mudd'"),
        ("optimizer: sgd", "optimizer must be one of 'adamw', 'muon', got 'sgd'"),
        (
            "loggers: [mlflow]",
            "loggers must be a list, each item one of 'tensorboard', 'wandb', got ['mlflow']",
        ),
        ("layers:", "layers must be a whole number, got None"),
        ("betas: [0.9]", "betas must be a list of 2, each a finite number, got [0.9]"),
        ("arms: mudd", "arms must be a list of at least one, got 'mudd'"),
        ("arms:", "arms must be a list of at least one, got None"),
        ("arms: []", "arms must be a list of at least one"),
        ("arms: [1]", "an arm is a connection or a mapping, got 1"),
        (
            "arms: [{name: no, connection: mudd}]",
            "must be a line of text, got False",
        ),
        (
            "arms: [{connection: mudd, parameters: many}]",
            "parameters of an arm must be a number, got 'many'",
        ),
        (
            "arms: [{connection: mudd, paper: [2.5]}]",
            "paper of an arm must be a mapping, got [2.5]",
        ),
        (
            "arms: [{connection: mudd, paper: {loss: low}}]",
            "paper's loss of an arm must be a number, got 'low'",
        ),
        ("arms: [{connection: mudd, 3: 4}]", "the key '3' in line 1 is not text"),
        ("yes: 3", "the key 'yes' in line 1 is not text"),
        ("model_config: {1: 2}", "the key '1' in line 1 is not text"),
        ("model_config: {x: 2024-01-01}", "the file: has a value of type date"),
        ("data: !!binary aGk=", "the file: has a value of type bytes"),
        (
            "layers: !!python/object/apply:os.system [x]",
            "could not determine a constructor for the tag",
        ),
        ("layers: 2\nlayers: 3", "the key 'layers' in line 2 is repeated"),
        ("arms: &a [*a]", "the file: nested deeper than 50 levels"),
        ("x: &a {layers: 2}\n<<: *a", "the key '<<' in line 2 is not text"),
        (BOMB, "the file: more than 100,000 values, with its aliases"),
        ("a: " + "[" * 5000, "nested too deep"),
        ("layers: 1" + "0" * 5000, "cannot be read as a recipe (Exceeds the limit"),
        ("lr: .nan", "lr must be a finite number, got nan"),
        ("router_z_loss: -1", "router_z_loss must be a number of at least 0, got -1.0"),
        ('arms: [{connection: mudd, name: "a\\nb"}]', "must be a line of text, got 'a\\nb'"),
        ('arms: [{connection: mudd, name: " "}]', "must not be empty, got ' '"),
        ("arms: [{connection: mudd, parameters: .inf}]", "parameters of an arm must be a number"),
        ("arms: [{connection: mudd, layers: 0}]", "layers must be a whole number of at least 1"),
        ("clip: -1", "clip must be a number of at least 0, got -1.0"),
        ("floor: .nan", "floor must be a finite number, got nan"),
        ("save_every: -5", "save_every must be a number of at least 0, got -5"),
        ("layers: [", "cannot be read as a recipe"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(tmp_path, content, message):
    with pytest.raises(ValueError) as error:
        load_recipe(written(tmp_path, content)).settings()
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'recipe.yaml'}: ")


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml: no such file"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(
        ValueError, match=r"scale must be one of full, tiny, got 'tinny' \(did you mean 'tiny'\?\)"
    ):
        load_recipe(written(tmp_path, "layers: 2"), "tinny")


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "recipe.yaml")
    for path in (tmp_path / "recipe.yaml", tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            load_recipe(path)


def test_what_comes_first(tmp_path):
    path = written(
        tmp_path, "lr: 1e-3\nsteps: 50\narms: [mudd, {connection: hyper, lr: 5e-4, steps: 60}]"
    )
    recipe = load_recipe(path, steps=3)
    mudd, hyper = (recipe.settings(arm).optimization for arm in recipe.arms)
    assert (mudd.lr, mudd.steps) == (1e-3, 3) and (hyper.lr, hyper.steps) == (5e-4, 3)
    assert recipe.settings().optimization.weight_decay == 0.1


def test_every_option_belongs_to_one_part_and_changes_the_identity_or_not():
    plain = Settings.from_options()
    assert (
        set(plain.to_options()) == set(GROUP_OF_OPTION)
        and set(plain.fixed_options()) == set(GROUP_OF_OPTION) - CHANGEABLE_OPTIONS
    )
    assert {"lr", "precision", "batch", "tokenizer", "delay"} <= plain.fixed_options().keys()
    assert {"strategy", "accumulate", "compile", "save_every", "workers"} <= CHANGEABLE_OPTIONS
    with pytest.raises(ValueError, match=r"unknown option 'step' \(did you mean 'steps'\?\)"):
        Settings.from_options(step=3)


def test_arms_are_themselves():
    arm = Arm.from_row({"connection": "mudd( dilation = 2 )", "parameters": "405e6", "lr": 1e-3})
    assert (arm.name, arm.connection, arm.parameters) == (
        "mudd(dilation=2)",
        "mudd(dilation=2)",
        405e6,
    )
    assert arm.options == {"lr": 1e-3}
    assert Recipe([Arm.from_row("prenorm")]).settings().model.layers == 6


def test_a_small_scale_keeps_what_is_no_number():
    """transformers' own default of the second is None."""
    config = {"intermediate_size": 344, "num_key_value_heads": None, "rope_theta": "x"}
    recipe = Recipe([Arm.from_row("prenorm")], {"dim": 128, "heads": 2, "model_config": config})
    small = replace(recipe, scale="tiny").settings().model.model_config
    assert small.items() >= {**config, "intermediate_size": 176}.items()


def test_a_prepared_corpus_comes_with_its_tokenizer(tmp_path, monkeypatch):
    """Whatever names the data. Another one that is named, or a pretrained model's, comes before."""
    (tmp_path / "text.txt").write_text("one two three four five six seven " * 999)
    folder = tmp_path / "prepared"
    prepare_corpus(str(tmp_path / "text.txt"), "bpe:260", folder)
    monkeypatch.setenv("PREPARED", str(folder))

    def tokenizer(**options):
        return Settings.from_options(**options).data.tokenizer

    for place in (str(folder), "$PREPARED", f"datasets:{folder}"):
        assert tokenizer(data=place) == "bpe:260"
    assert tokenizer(data=str(tmp_path / "text.txt")) == tokenizer(data="stdlib") == "bytes"
    assert tokenizer(data=str(folder), tokenizer="bytes") == "bytes"
    assert tokenizer(data=str(folder), pretrained="model", lr=1e-4) == "model"
    recipe = Recipe([Arm("a", "prenorm", options={"data": str(folder)}), Arm("b", "prenorm")])
    assert [recipe.settings(arm).data.tokenizer for arm in recipe.arms] == ["bpe:260", "bytes"]
    examples = load_texts(recipe.settings(recipe.arms[0]).data, {})
    tokens = examples.valid["held-out"].tokens
    bits = tokens.entropy_per_token * len(tokens)
    assert examples.num_classes == 260
    assert math.isclose(examples.entropy, bits / tokens.text_bytes)

    (folder / "corpus.json").write_text('{"tokenizer": 1}')
    with pytest.raises(ValueError, match="prepared: damaged, prepare it again"):
        load_texts(Settings.from_options(data=str(folder)).data, {})
