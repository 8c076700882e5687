-- Register terminal records of one group: the only place of dedupe. Runs in one MULTI behind the HSETs of the
-- payloads; what is not registered is unlinked here, so a payload without a reference cannot stay behind.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes, rollouts, scorer: scoring | void,
--       payloads: payload | void ...
-- ARGV  those of an admission, see lib/admit; '1' if the run has scorers, then for each record: index (-1 = the
--       highest free one of those allowed), kind, reward ('' = none yet), bytes, payload key (a nonce for index -1),
--       role, reference JSON (for the first -1 the slots that are allowed: a '0' or '1' for each from slot 0 on)
--       kind is 'usable', or the reason the slot ended: failed, aborted, cancelled, unscorable
-- Returns  {'ok', code of each record ...}  'pushed' ('pushed <index>' for index -1), 'duplicate', 'surplus' or
--                                           'late' (the group had ended), 'range' (no such slot)
--          {'busy', reason, used, limit}    the group was unknown and is not admitted now
--          {'mismatch', size}               open with another size
--          {'layout'}                       the run may have another number of shards: read the manifest again
--          {'broken'}                       its hash is not what the scripts wrote
-- include clock
-- include sizes
-- include admit
-- include play
-- include ended
-- include holders
-- include adopt
local spec = admission_of(ARGV)
local id, scored_later = spec.id, ARGV[ADMISSION_ARGS + 1] == '1'
local first_record, width = ADMISSION_ARGS + 2, 7
local records = (#ARGV - first_record + 1) / width

local function unlink_all(reply)
  for i = 0, records - 1 do redis.call('UNLINK', keys.payloads[i + 1]) end
  return reply
end

local ended, ended_key = find_ended(keys, id)
local slots = spec.slots
if not ended then
  local group = redis.pcall('HMGET', keys.group, 'size', 'slots', 'unfilled', 'slot_bytes')
  for i = 1, 4 do
    if group.err or (group[1] and not string.match(group[i] or '', '^%-?%d+$')) then return unlink_all({'broken'}) end
  end
  if not group[1] then
    local refused = open_group(keys, spec)
    if refused then return unlink_all(refused) end
  elseif group[1] ~= spec.size then
    return unlink_all({'mismatch', group[1]})
  else
    slots = tonumber(group[2])
    if is_withdrawn(keys.group) then adopt(keys, spec, '-') end
  end
else
  slots = #ended - 1
end

-- Take the slot: true if nobody had it before.
local function take(index)
  if ended then
    if string.sub(ended, index + 2, index + 2) ~= '0' then return false end
    ended = string.sub(ended, 1, index + 1) .. '1' .. string.sub(ended, index + 3)
    redis.call('HSET', ended_key, id, ended)
    return true
  end
  return redis.call('HSETNX', keys.group, index, 'p') == 1
end

local codes, stuck = {'ok'}, nil
local pushed, duplicates, in_rollouts, in_scoring, bytes_in, sizes, dropped = 0, 0, 0, 0, 0, {}, {}
local allowed, next_free = '', 0  -- for -1: from next_free on all slots are taken, or not allowed
for i = 0, records - 1 do
  local at = first_record + i * width
  local index, kind, reward, bytes = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local code, registered
  if index == -1 then
    registered = false
    if ARGV[at + 6] ~= '' then allowed, next_free = ARGV[at + 6], math.min(#ARGV[at + 6], slots) end
    local taken = not ended and redis.call('HGET', keys.group, 'cancel:' .. ARGV[at + 4])  -- this call comes again
    taken = taken and string.match(taken, '^%d+$')
    if ended then
      code = string.sub(ended, 1, 1) == 'c' and 'surplus' or 'late'
    elseif taken then
      next_free = math.min(next_free, tonumber(taken))
      code = 'pushed ' .. taken
    else
      while next_free > 0 and not registered do
        next_free = next_free - 1
        registered = string.sub(allowed, next_free + 1, next_free + 1) == '1' and take(next_free)
      end
      if registered then
        index = next_free
        redis.call('HSET', keys.group, 'cancel:' .. ARGV[at + 4], index)
      end
      code = registered and 'pushed ' .. index or 'range'
    end
  elseif index >= slots then
    registered, code = false, 'range'
  else
    registered = take(index)
    code = registered and 'pushed' or 'duplicate'
  end
  if code == 'duplicate' then duplicates = duplicates + 1 end
  if registered then
    pushed = pushed + 1
    if ended then
      code = string.sub(ended, 1, 1) == 'c' and 'surplus' or 'late'
      local reason = kind == 'usable' and code or kind
      dropped[reason] = (dropped[reason] or 0) + 1
      registered = false
    else
      local to_scorer = scored_later and kind == 'usable' and reward == ''
      local added = redis.pcall('XADD', to_scorer and keys.scorer or keys.rollouts, '*', 'group_id', id, 'index', index, 'kind', kind, 'reward', reward,
        'bytes', ARGV[at + 3], 'key', ARGV[at + 4], 'role', ARGV[at + 5],
        'reference', ARGV[at] == '-1' and '' or ARGV[at + 6])
      if added.err then  -- it has had its last possible id: nothing of this record stays, nor do those that follow come
        redis.call('HDEL', keys.group, index, 'cancel:' .. ARGV[at + 4])
        stuck, pushed = i, pushed - 1
      else
        bytes_in = bytes_in + bytes
        if bytes > 0 then sizes[#sizes + 1] = bytes end
        if to_scorer then in_scoring = in_scoring + 1 else in_rollouts = in_rollouts + 1 end
      end
    end
  end
  if stuck then break end
  if not registered then redis.call('UNLINK', keys.payloads[i + 1]) end
  codes[#codes + 1] = code
end

if pushed > 0 then redis.pcall('HINCRBY', keys.ledger, 'pushed', pushed) end
if duplicates > 0 then redis.pcall('HINCRBY', keys.ledger, 'duplicates', duplicates) end
if in_rollouts > 0 then redis.pcall('HINCRBY', keys.ledger, 'rollouts', in_rollouts) end
if in_scoring > 0 then redis.pcall('HINCRBY', keys.ledger, 'scoring', in_scoring) end
for reason, count in pairs(dropped) do redis.call('HINCRBY', keys.ledger, 'dropped:' .. reason, count) end
local used = in_rollouts + in_scoring
if used > 0 then
  redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', bytes_in))
  if #sizes > 0 then note_sizes(keys.sizes, sizes) end
  redis.call('HINCRBY', keys.group, 'unfilled', -used)
  reserve(keys.sizes, redis.call('HMGET', keys.group, 'slot_bytes')[1], -used)
  play(keys, spec.producer)
end
if stuck then
  for i = stuck, records - 1 do redis.call('UNLINK', keys.payloads[i + 1]) end
  return redis.error_reply('STREAMEND no more entries fit into its stream')
end
return codes
