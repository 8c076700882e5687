-- Entering a group: it is opened if need be.
-- KEYS  open, groups, ended, ended_before, ledger, trainer, sizes
-- include clock
-- include sizes
-- include group
-- include ended
local SPEC_ARGS = 2

-- The arguments of a group that may be opened: id, '<role> <size> <slots> <deadline, ms> <data source>', the
-- slots with the bytes of the group's own columns behind them if it has some: '8+4096'. The role is that of
-- its members: train (baselines are in such groups) or eval, the latter with the round if it has one: 'eval/<round>'.
local function spec_of(args, at)
  local role, round, size, slots, columns_bytes, deadline_ms, data_source =
    string.match(args[at + 1], '^(%l+)/?(%S*) (%d+) (%d+)%+?(%d*) (%d+) (.*)$')
  return {id = args[at], role = role, round = round, size = tonumber(size), slots = slots, deadline_ms = deadline_ms,
    columns_bytes = columns_bytes ~= '' and columns_bytes or nil, data_source = data_source}
end

local admission, open_group  -- see lib/admit: made for the first group that this call opens

local function prepare_admission(limits)
-- include slot_bytes
-- include pacing
-- include admit
  admission, open_group = read_admission(limits), admit
end

-- Make sure that a group without a tombstone is open, with this size and role. If its first caller had withdrawn it,
-- `holder` takes it over. limits: see lib/admit. The caller saves the group. Returns the group, whether this call opened it
-- or took it over, and nil or a refusal: of a group that is not open one of `admit` (lib/admit), else {'mismatch', its
-- size, its role}, or {'broken'} if its hash is not what the scripts wrote.
local function enter(group, spec, producer, limits, holder)
  if group.state == 'broken' then return nil, false, {'broken'} end
  if group.state == 'none' then
    if not admission then prepare_admission(limits) end
    local opened, refused = open_group(group.hash, spec, producer)
    return opened, true, refused
  end
  if group.size ~= spec.size or group.role ~= spec.role then
    return nil, false, {'mismatch', string.format('%d', group.size), group.role}
  end
  local missing = spec.slots - #group.slots
  if missing > 0 and string.match(limits, '%S+$') == '0' then  -- a push without a ticket knew of fewer, and brought it back first
    group.slots = group.slots .. string.rep('.', missing)
    change(group, 'slots', group.slots)
    reserve(group.slot_bytes, missing)
  end
  if not is_withdrawn(group) then return group, false end
  local trainer = redis.call('HMGET', keys.trainer, 'epoch', 'version', 'clock')
  group.holders, group.epoch, group.version = holder, trainer[1] or '0', trainer[2] or '0'
  change(group, 'holders', holder)
  change(group, 'head', head_of(group))
  redis.call('ZADD', keys.open, string.format('%.17g', shard_ms(trainer[3], now_ms()) + spec.deadline_ms), spec.id)
  play(group, producer)
  return group, true
end
