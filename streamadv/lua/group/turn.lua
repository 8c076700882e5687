-- Append turns to a rollout before its agent sees them, or read those that there are (lib/turns). Appending moves the
-- group's deadline on.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes
-- ARGV  the group (see lib/enter); producer; limits (see lib/admit); slot; turns that the caller knows of; bytes that a
--       rollout may have; deadline of the group from now on (ms), each turn to append ...
-- Returns  {'ok'}                           appended, by this call or by one like it before
--          {'behind', turn ...}             the slot has more turns than the caller knows of: those; nothing changes
--          {'lost', number}                 it has fewer: the server has lost some; nothing changes
--          {'large', bytes}                 they would be more than a rollout may have
--          {'ended', letter}                the slot has ended: its letter, or digit of the tombstone; '' = no such slot
--          or a refusal (lib/enter)
--   and without turns to append
--          {'turns', data source, what its group shares or '', turn ...}   from the one after those that the caller knows
--          {'none'}                         the group is neither open nor remembered
-- include enter
-- include turns
local OTHER_ARGS = SPEC_ARGS + 6
local spec, producer, limits, slot, known, most, deadline_ms = spec_of(ARGV, 1), unpack(ARGV, SPEC_ARGS + 1, OTHER_ARGS)
known, most, deadline_ms = tonumber(known), tonumber(most), tonumber(deadline_ms)
local appended = #ARGV - OTHER_ARGS

local function field(n) return 'turn:' .. slot .. ':' .. n end

-- Turns from `known` on, at the end of a reply.
local function with_turns(reply, group, count)
  for n = known, count - 1 do reply[#reply + 1] = redis.call('HGET', group.hash, field(n)) or '' end
  return reply
end

-- Whether the last turns are those of this call, which is sent again.
local function are_there(group, count)
  if known + appended ~= count then return false end
  for i = 1, appended do
    if redis.call('HGET', group.hash, field(known + i - 1)) ~= ARGV[OTHER_ARGS + i] then return false end
  end
  return true
end

local function append(group)
  local count, bytes = turns_of(group, slot)
  if known < count then
    return are_there(group, count) and {'ok'} or with_turns({'behind'}, group, count)
  end
  if known > count then return {'lost', count} end
  for i = 1, appended do bytes = bytes + #ARGV[OTHER_ARGS + i] end
  if bytes > most then return {'large', string.format('%d', bytes)} end
  for i = 1, appended do change(group, field(count + i - 1), ARGV[OTHER_ARGS + i]) end
  change(group, 'turns:' .. slot, string.format('%d %d', count + appended, bytes))
  if not group.turned then change(group, 'turned', '1') end
  play(group, producer)
  -- The deadline is moved at most four times in the time that it is moved on by.
  local now = shard_ms(redis.call('HMGET', keys.trainer, 'clock')[1], now_ms())
  local deadline = tonumber(redis.call('ZSCORE', keys.open, spec.id) or '')
  if deadline and now + deadline_ms * 3 / 4 > deadline then
    redis.call('ZADD', keys.open, string.format('%.17g', now + deadline_ms), spec.id)
  end
  return {'ok'}
end

local group = load_group(spec.id, keys.group)
local tombstone = group.state == 'none' and find_ended(spec.id)
if tombstone then return {'ended', string.sub(tombstone, slot + 2, slot + 2)} end
if appended == 0 and group.state == 'none' then return {'none'} end
if appended > 0 or group.state == 'broken' then
  local entered, _, refused = enter(group, spec, producer, limits, '-')
  if refused then return refused end
  group = entered
end
local letter, reply = string.sub(group.slots, slot + 1, slot + 1), nil
if letter ~= '.' then
  reply = {'ended', letter}
elseif appended == 0 then
  reply = with_turns({'turns', group.data_source, redis.call('HGET', group.hash, 'shared') or ''}, group, (turns_of(group, slot)))
else
  reply = append(group)
end
save_group(group)  -- also one that was opened again and takes no turn: it is counted
write_figures()
return reply
