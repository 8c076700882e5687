-- Admission: whether a group may be opened now, and opening it.
-- KEYS  open, groups, ledger, trainer, sizes
local LIMITS_ARGS, SPEC_ARGS = 8, 6

-- The arguments of a group that may be opened: group id, size, slots, data source, deadline (ms), role of its members:
-- 'train' (baselines are in such groups) or 'eval'.
local function spec_of(args, at)
  return {id = args[at], size = args[at + 1], slots = tonumber(args[at + 2]), data_source = args[at + 3],
    deadline_ms = tonumber(args[at + 4]), role = args[at + 5]}
end

-- What admission depends on beside the group: max_trajectory_bytes, max_bytes of this shard (-1 = open nothing), shards,
-- groups that count in the other shards ('' = not known), max_staleness and batch_groups until a trainer says its own
-- ('' = no pacing), producer, '1' if the group may be new: one that was admitted before is opened again also after the
-- trainer has ended the run.
local function limits_of(args, at)
  return {max_trajectory_bytes = tonumber(args[at]), max_bytes = tonumber(args[at + 1]), shards = tonumber(args[at + 2]),
    elsewhere = tonumber(args[at + 3]), max_staleness = args[at + 4], batch_groups = args[at + 5], producer = args[at + 6],
    is_new = args[at + 7] == '1'}
end

local admission  -- what the admissions of this call are judged by, read for the first of them

local function read_admission(limits)
  local trainer = redis.call('HMGET', keys.trainer, 'max_staleness', 'batch_groups', 'held', 'epoch', 'version', 'announced',
    'finished', 'weights')
  local ledger = redis.call('HMGET', keys.ledger, 'shards', 'live_bytes', 'groups_eval', 'groups_abandoned')
  local sizes = read_sizes(keys.sizes)
  return {max_staleness = tonumber(trainer[1] or limits.max_staleness),
    batch_groups = tonumber(trainer[2] or limits.batch_groups), ahead = groups_ahead(trainer[3], ledger[3], ledger[4]),
    epoch = trainer[4] or '0', version = trainer[5] or '0', announced = trainer[6] or '', finished = trainer[7] == '1',
    weights = trainer[8] or '', sizes = sizes, slot_bytes = slot_bytes(sizes, limits.max_trajectory_bytes),
    shards = tonumber(ledger[1] or ''), live_bytes = tonumber(ledger[2] or '') or 0}
end

-- Returns a refusal if the producers are too far ahead of the trainer, else nil. Evaluation is never trained on: it is
-- not paced.
local function too_far_ahead(spec, limits)
  if spec.role == 'eval' or not (admission.max_staleness and admission.batch_groups) then return nil end
  local limit = (admission.max_staleness + 1) * admission.batch_groups
  local used = admission.ahead + (limits.elsewhere or 0)
  -- A shard admits its own share by itself. A client that wants more says how many groups the other shards have, because
  -- neither ids nor groups need spread evenly.
  if limits.shards > 1 and not limits.elsewhere then limit = math.floor(limit / limits.shards) end
  return used >= limit and {'busy', 'max_staleness', used, limit} or nil
end

-- Returns a refusal if the slots of the group do not fit into the budget, else nil.
local function no_room(spec, limits)
  local bytes = admission.slot_bytes
  local needed, limit = spec.slots * bytes, string.format('%.17g', limits.max_bytes)
  local used = admission.live_bytes + (counts.live_bytes or 0) + reserved_bytes(admission.sizes, bytes)
  if used + needed <= limits.max_bytes then return nil end
  if limits.max_bytes >= 0 and needed > limits.max_bytes then
    return {'busy', 'group_bytes', string.format('%.17g', bytes), limit}
  end
  local moving = count_of(keys.ledger, 'rollouts') + count_of(keys.ledger, 'scoring') + count_of(keys.ledger, 'in_flight')
  return {'busy', 'max_bytes', string.format('%.17g', used), limit, redis.call('ZCARD', keys.open),
    redis.call('XLEN', keys.groups), moving, admission.batch_groups or '', string.format('%.17g', bytes)}
end

-- Admit and open a group that does not exist. Returns nil when opened, else
--   {'over'}    the trainer has ended the run
--   {'busy', 'max_staleness', groups ahead, limit}
--   {'busy', 'group_bytes', bytes a slot needs, max_bytes}   more than the whole budget
--   {'busy', 'max_bytes', bytes used, max_bytes, open groups, groups logged, trajectories in streams and in flight,
--    batch_groups or '', bytes a slot needs}
--               each with the last entry of the stream `admission` behind it ('' = none), see lib/announce
--   {'layout'}  nobody has confirmed that the run has so many shards: the server may have lost its manifest, and nobody
--               may read what is pushed here
-- What is reserved is a function of the open groups' free slots, so no credit can leak.
local function open_group(group, spec, limits)
  admission = admission or read_admission(limits)
  if admission.shards ~= limits.shards then return {'layout'} end
  if admission.finished and limits.is_new and spec.role ~= 'eval' then return {'over'} end
  local refused = too_far_ahead(spec, limits) or no_room(spec, limits)
  if refused then
    refused[#refused + 1] = admission.announced
    return refused
  end
  local now = now_ms()
  group.state, group.size, group.slots = 'open', tonumber(spec.size), string.rep('.', spec.slots)
  group.opened_ms, group.slot_bytes, group.data_source = now, admission.slot_bytes, spec.data_source
  group.epoch, group.version, group.producer = admission.epoch, admission.version, limits.producer
  group.role = spec.role
  group.changes = {'size', spec.size, 'slots', group.slots, 'data_source', spec.data_source,
    'opened_ms', string.format('%d', now), 'slot_bytes', string.format('%d', group.slot_bytes),
    'producer', limits.producer, 'epoch', group.epoch, 'version', group.version}
  -- The first write: above maxmemory it is refused.
  redis.call('ZADD', keys.open, string.format('%d', now + spec.deadline_ms), spec.id)
  forget_half(keys.sizes, admission.sizes)
  reserve(group.slot_bytes, spec.slots)
  count('groups_open', 1)
  if spec.role == 'eval' then
    change(group, 'role', 'eval')
    count('groups_eval', 1)
  else
    admission.ahead = admission.ahead + 1
  end
  return nil
end
