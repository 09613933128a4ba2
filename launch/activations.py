"""From the name of a policy to its rules: a file of `conf/offload/`, or one of the user's own."""

from __future__ import annotations

from pathlib import Path

import yaml

from k3train.activation_policy import BUDGET
from k3train.config import Config
from k3train.errors import UserError

from .groups import policies, policy_file
from .overrides import closest


def rules(config: Config, given: set[str]) -> dict[str, str]:
    """Pattern of sites -> storage, as the policy's file has them.

    Args:
        given: keys of the command line.

    Raises:
        UserError: there is no such policy, its file cannot be read, or somebody set what is derived.
    """
    name, key = config.offload.policy, "offload.resolved"
    if any(f"{entry}.".startswith(f"{key}.") for entry in given):
        raise UserError(f"{key}: is derived from offload.policy; change single sites with offload.sites")
    if name == BUDGET:
        return {}
    if name in policies():
        return _read(policy_file(name), name)
    if not name.endswith((".yaml", ".yml")):
        known = [*policies(), BUDGET]
        raise UserError(
            f"offload.policy={name}: no such policy; valid are {', '.join(known)} or the path of a .yaml file"
            f"{closest(name, known)}"
        )
    return _read(Path(name).expanduser(), name)


def _read(path: Path, name: str) -> dict[str, str]:
    try:
        tree = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"offload.policy={name}: cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"offload.policy={name}: not YAML ({str(error).splitlines()[0]})") from error
    if tree is None:
        return {}
    if not isinstance(tree, yaml.MappingNode):
        raise UserError(f"offload.policy={name}: expected a mapping from sites to storages like kda.*: host")
    found: dict[str, str] = {}
    for site, storage in tree.value:
        where = f"offload.policy={name}: line {site.start_mark.line + 1}: "
        if not _is_text(site) or not _is_text(storage):
            raise UserError(f"{where}expected a site and its storage, like kda.*: host")
        if site.value in found:
            raise UserError(f"{where}{site.value} has a storage already; remove one of the two")
        found[site.value] = storage.value
    return found


def _is_text(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"
