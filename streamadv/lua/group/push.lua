-- Register terminal records of one group: the only place of dedupe. Runs in one MULTI after the HSETs of the payloads,
-- each with a time to live: one that is registered keeps for ever, and one whose script a server does not know, as
-- after a failover, goes by itself. The payload of a record that is not registered is unlinked, so none stays without a
-- reference.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes, rollouts, scorer: scoring | void,
--       payloads: payload | void ...
-- ARGV  those of an admission, see lib/admit; '1' if the run has scorers, then for each record: index, kind, reward
--       ('' = none yet), bytes, payload key, role, reference JSON
--       kind is 'usable', or the reason the slot ended: failed, aborted, cancelled, unscorable
-- Returns  {'ok', code of each record ...}  'pushed', 'duplicate', 'surplus' or 'late' (the group had ended), 'range' (no
--                                           such slot), 'lost' (its payload is gone: send it again under a new key)
--          {'busy', reason, used, limit ...}   the group was unknown and is not admitted now
--          {'mismatch', size}               open with another size
--          {'layout'}                       the run may have another number of shards: read the manifest again
--          {'broken'}                       its hash is not what the scripts wrote
-- include clock
-- include sizes
-- include pacing
-- include admit
-- include play
-- include ended
-- include holders
-- include enter
-- include arrive
local spec, scored_later = admission_of(ARGV), ARGV[ADMISSION_ARGS + 1] == '1'
local first_record, width = ADMISSION_ARGS + 2, 7
local records = (#ARGV - first_record + 1) / width

local function unlink_from(first)
  for i = first, records - 1 do redis.call('UNLINK', keys.payloads[i + 1]) end
end

local tombstone, tombstones = find_ended(spec.id)
local slots, _, refused = tombstone and #tombstone - 1 or nil
if not tombstone then slots, _, refused = enter(spec, '-') end
if refused then
  unlink_from(0)
  return refused
end

-- Take a slot. Returns whether it was free.
local function take(index)
  if not tombstone then return redis.call('HSETNX', keys.group, index, 'p') == 1 end
  if slot_digit(tombstone, index) ~= '0' then return false end
  tombstone = end_slot(tombstones, spec.id, tombstone, index)
  return true
end

local arrived = {rollouts = 0, scoring = 0, bytes = 0, sizes = {}}

-- Append the record that begins at ARGV[at]. Returns whether its stream takes entries.
local function append(at)
  local bytes = tonumber(ARGV[at + 3])
  local to_scorer = scored_later and ARGV[at + 1] == 'usable' and ARGV[at + 2] == ''
  local id = redis.pcall('XADD', to_scorer and keys.scorer or keys.rollouts, '*', 'group_id', spec.id, 'index', ARGV[at],
    'kind', ARGV[at + 1], 'reward', ARGV[at + 2], 'bytes', ARGV[at + 3], 'key', ARGV[at + 4], 'role', ARGV[at + 5],
    'reference', ARGV[at + 6])
  if id.err then return false end
  local stream = to_scorer and 'scoring' or 'rollouts'
  arrived[stream] = arrived[stream] + 1
  arrived.bytes = arrived.bytes + bytes
  if bytes > 0 then arrived.sizes[#arrived.sizes + 1] = bytes end
  return true
end

local codes, duplicates, dropped, stream_ended = {'ok'}, 0, {}, false
for i = 0, records - 1 do
  local at = first_record + i * width
  local index, kind, code = tonumber(ARGV[at]), ARGV[at + 1], 'pushed'
  if index >= slots then
    code = 'range'
  elseif tonumber(ARGV[at + 3]) > 0 and redis.call('PERSIST', keys.payloads[i + 1]) == 0 then
    code = 'lost'
  elseif not take(index) then
    code, duplicates = 'duplicate', duplicates + 1
  elseif tombstone then
    code = after_end(tombstone)
    local reason = kind == 'usable' and code or kind
    dropped[reason] = (dropped[reason] or 0) + 1
  elseif not append(at) then  -- it has had its last possible id: nothing of this record stays, and none that follow come
    redis.call('HDEL', keys.group, index)
    unlink_from(i)
    stream_ended = true
    break
  end
  if code ~= 'pushed' then redis.call('UNLINK', keys.payloads[i + 1]) end
  codes[#codes + 1] = code
end

arrive(arrived, spec.producer)
if duplicates > 0 then redis.pcall('HINCRBY', keys.ledger, 'duplicates', duplicates) end
for reason, count in pairs(dropped) do
  redis.pcall('HINCRBY', keys.ledger, 'pushed', count)
  redis.call('HINCRBY', keys.ledger, 'dropped:' .. reason, count)
end
if stream_ended then return redis.error_reply('STREAMEND no more entries fit into its stream') end
return codes
